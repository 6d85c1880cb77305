"""Several engines ("instances") behind one job API, or one run of a file.

Theory of operation
===================

::

    jobs / file_run                                     a node
         │ respond(line)                                ┌───────────────────────────────────────────┐
         v                                              │ actor (ray_actor)                         │
    InstancePool (pool.py) ── lots of lines ──────────> │ InstanceServer ──> EngineSupervisor ──>   │
      one LineEngine for all instances                  │   │                 the engine's process  │
         ^                                              │   v                                       │
         └─────────── reports: answers, tokens ──────── │ Spool: answers, synced before they are    │
                      deaths, statistics                │        reported                           │
                                                        └───────────────────────────────────────────┘

- The pool is a `LineEngine`: jobs know nothing of instances. Lines wait in one queue; each instance is fed ahead of
  what it computes, in lots, and when no line waits any more, lines that an instance has not begun are taken back for
  one that has nothing left.
- An instance writes each answer to its spool before it reports it, and keeps it until the pool has acknowledged it,
  which it does when the job has committed it. So nothing waits for the slowest instance, and a server that is started
  again collects what was answered meanwhile before anything is computed again.
- A line is known by its key: a digest of its endpoint and body, and how many such lines were in flight at once. The
  body has a seed, so that equal keys have equal answers.
- An instance that dies is replaced by one of a higher incarnation. What it had goes on elsewhere, from the tokens that
  it had reported. What an instance says that was given up is not read any more.
- When an engine dies for no known reason, the lines that it had are suspects, as in `jobs.batch_service`: they run
  again in smaller and smaller groups, alone on one instance (`quarantine.py`), while the others go on.
"""
