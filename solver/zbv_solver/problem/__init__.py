"""The question: a `Problem` by stages or a `LayeredProblem` by layers, and their JSON documents.

Problems are validated and their numbers normalised here, once. Nothing here knows how a problem is solved.
Start at `reading` (documents to problems), `writing` (problems to documents) and `problem`; `jitter` says how
durations vary.
"""
