"""What a microbatch costs a rank when waiting in gaps earns a price."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbv_solver.bounds.memory_states import MemoryStates
from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.kernels.jit import compiled

SWEEPS = 60
MOST_PERIOD = 6


@dataclass(frozen=True, eq=False)
class Price:
    price: FloatArray
    cost: float
    potential: FloatArray
    total: float


def priced(model: MemoryStates, direction: FloatArray, sweeps: int = SWEEPS) -> Price:
    gaps = len(model.paths)
    earns = model.states[:, :gaps] @ direction
    price = direction / earns.max()
    rate = np.clip(1 - earns / earns.max(), 0.0, None)
    cost, potential = _cheapest(model.follows, model.duration, rate, sweeps)
    return Price(price, cost, potential, cost + float(price @ model.paths))


@compiled
def _cheapest(follows, duration, rate, sweeps):  # pragma: no cover - compiled
    n, actions = follows.shape
    kept = 7
    f = np.zeros((kept, n))
    best = -1.0
    h = np.zeros(n)
    for k in range(1, sweeps + 1):
        now, before = f[k % kept], f[(k - 1) % kept]
        now[:] = np.inf
        for s in range(n):
            t = follows[s, 0]
            if t >= 0:
                now[t] = before[s] + duration[0] * rate[t]
        for s in range(n):
            for a in range(1, actions):
                t = follows[s, a]
                if t >= 0:
                    value = now[s] + duration[a] * rate[t]
                    if value < now[t]:
                        now[t] = value
        for period in range(1, min(kept - 1, k) + 1):
            old = f[(k - period) % kept]
            least = np.inf
            for s in range(n):
                least = min(least, now[s] - old[s])
            v = least / period
            if v > best * (1 + 1e-12) + 1e-12:
                best = v
                for s in range(n):
                    h[s] = np.inf
                    for i in range(period):
                        h[s] = min(h[s], f[(k - period + i) % kept][s] - i * v)
    return best, h


@compiled
def _early(states, follows_h, cost, price, paths, duration, heads, times, opens):  # pragma: no cover
    """E(A) for every time."""
    n, dims = states.shape
    gaps = len(paths)
    chunks = dims - gaps
    known = heads.shape[1]
    out = np.full(len(times), np.inf)
    longest = duration.max()
    late = np.zeros((gaps, known + 1))
    count = np.zeros(gaps + 1, np.int64)
    c = np.zeros(gaps + 1, np.int64)
    for ti in range(len(times)):
        A = times[ti]
        for i in range(gaps + 1):
            count[i] = np.searchsorted(heads[i], A)
        for i in range(gaps):
            for k in range(known):
                late[i, k + 1] = late[i, k] + max(0.0, heads[i + 1, k] - A)
        best = -np.inf
        for s in range(n):
            for z in range(count[gaps] + 1):
                c[gaps] = z
                ok = True
                for i in range(gaps - 1, -1, -1):
                    c[i] = c[i + 1] + states[s, i]
                    if c[i] > count[i]:
                        ok = False
                        break
                if not ok:
                    break
                work = 0.0
                for i in range(gaps + 1):
                    work += duration[i] * c[i]
                for j in range(chunks):
                    done = c[2 * chunks - 1 - j] - states[s, gaps + j]
                    if done < 0:
                        ok = False
                    work += duration[2 * chunks + j] * done
                if not ok or (opens and work - longest > A * (1 + 1e-9)):
                    continue
                value = cost * c[0] + follows_h[s]
                for i in range(gaps):
                    value += price[i] * (paths[i] * c[i] - (late[i, c[i]] - late[i, c[i + 1]]))
                best = max(best, value)
        out[ti] = best
    return out


@compiled
def _late(states, h, cost, price, paths, duration, tails, times, closes):  # pragma: no cover
    n, dims = states.shape
    gaps = len(paths)
    chunks = dims - gaps
    known = tails.shape[1]
    out = np.full(len(times), np.inf)
    longest = duration.max()
    wait = np.zeros((gaps, known + 1))
    count = np.zeros(gaps + 1, np.int64)
    c = np.zeros(gaps + 1, np.int64)
    for ti in range(len(times)):
        B = times[ti]
        for i in range(gaps + 1):
            count[i] = np.searchsorted(tails[i], B)
        for i in range(gaps):
            for k in range(known):
                wait[i, k + 1] = wait[i, k] + min(paths[i], max(0.0, tails[i, k] + duration[i] - B))
        best = -np.inf
        for s in range(n):
            for z in range(count[0] + 1):
                c[0] = z
                ok = True
                for i in range(gaps):
                    c[i + 1] = c[i] + states[s, i]
                    if c[i + 1] > count[i + 1]:
                        ok = False
                        break
                if not ok:
                    break
                work = 0.0
                for i in range(gaps + 1):
                    work += duration[i] * c[i]
                for j in range(chunks):
                    work += duration[2 * chunks + j] * (c[2 * chunks - 1 - j] + states[s, gaps + j])
                if closes and work - longest > B * (1 + 1e-9):
                    continue
                value = cost * c[0] - h[s]
                for i in range(gaps):
                    value += price[i] * (paths[i] * c[i + 1] - (wait[i, c[i + 1]] - wait[i, c[i]]))
                best = max(best, value)
        out[ti] = best
    return out


def ramp(model, q, heads, tails, m, opens, closes, most=4):
    """heads, tails (gaps+1, n)."""
    n = heads.shape[1]
    gaps = len(model.paths)
    cap = min(heads[:, -1].min(), tails[:, -1].min()) if n < m else np.inf
    te = np.unique(heads)
    te = te[(te > 0) & (te <= heads[gaps, min(most, n - 1)]) & (te <= cap)]
    tl = np.unique(tails)
    tl = tl[(tl > 0) & (tl <= tails[0, min(most, n - 1)]) & (tl <= cap)]
    te, tl = np.append(0.0, te), np.append(0.0, tl)
    E = _early(model.states, q.potential, q.cost, q.price, model.paths, model.duration, heads, te, opens)
    L = _late(model.states, q.potential, q.cost, q.price, model.paths, model.duration, tails, tl, closes)
    best = (0, 0, 0)
    for a, e in zip(te, E):
        ne = max(np.searchsorted(row, a) for row in heads)
        for b, l in zip(tl, L):
            nl = max(np.searchsorted(row, b) for row in tails)
            if ne + nl < m:
                best = max(best, (a + b + m * q.total - e - l, a, b))
    return best
