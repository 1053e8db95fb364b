import sys, json, time, pickle
import benchmarks.worker.layouts as L
from benchmarks.worker.layouts import *
def main():
    m = SmallModel(*map(int, sys.argv[1].split(',')))
    w = LayoutsWorkload(models=(m,), rounds=int(sys.argv[3]), repeats=8, processes_do=sys.argv[4])
    t=time.time()
    orig = L.profiled
    docs = []
    def prof(*a):
        import os
        if len(sys.argv) > 5:
            ds = json.load(open(f'/tmp/calib_{sys.argv[5]}_prof.json')); yield from (slower(d, 2) if sys.argv[4] == 'compute' else d for d in ds); return
        for d in orig(*a):
            docs.append(d); yield d
    L.profiled = prof
    lay = predicted(m, w)
    print('predicted', len(lay), time.time()-t, flush=True)
    json.dump(docs, open(f'/tmp/calib_{sys.argv[2]}_prof.json','w'))
    seen=[]
    orig_on = L.on_ranks
    def on(*a):
        r = orig_on(*a); seen.append(r); return r
    L.on_ranks = on
    times = measured(m, lay, w)
    pickle.dump((lay, times, seen), open(f'/tmp/calib_{sys.argv[2]}.pkl','wb'))
    print('measured', time.time()-t)
    for f in findings(str(m), lay, times): print(f"{f.what:90s} {f.value:8.3f}")
if __name__ == '__main__': main()
