"""OpenAI files and batches as a service without HTTP: it validates, runs, commits and finishes jobs.

Theory of operation
===================

A job is a file of request lines and a row in the database. `BatchService` (service.py) is the only class that the API
uses. One `LifecycleDriver` takes each job from status to status; the table of moves is lifecycle.py::

    validating ──> in_progress ──> finalizing ──> completed
      │ │ │            │               └────────> expired       (its window ended first)
      │ │ │            └── cancel ──> cancelling ──> cancelled
      │ │ └── cancel ──────────────────────^
      │ └──── its window ends ──────────────────> expired
      └────── faults in the input ──────────────> failed

While a job is in_progress, its lines take this path::

    InputReader ──> Dispatcher ──> EngineSession ──> engine
    (one a job,     (whose line    (lines in           │
     reads ahead)    is next:       flight on one      ├── answer ──> Committer ──> segment, then rows
                     fair_share)    engine)            │
                         ^                             └── death ───> SuspectQueue
                         └──────── groups of lines that run with no others ─┘

1. Validation reads the whole input once and finds what fails the job: lines that are not JSON, repeated custom_ids,
   other models or endpoints. Whatever the engine would refuse is that line's own error later.
2. The dispatcher gives lines to the engine, up to a number and a size in flight.
3. The committer takes finished lines in groups. It appends their result lines to the job's segment and syncs it. One
   transaction then adds a row for each line and its counts to the job's row.
4. When all lines are done, the window ends, or the job is cancelled, the dispatcher gives up what is in flight. The
   finalizer writes the output and the error file in input order. A line without an answer gets an error line there.
5. The transaction that ends the job adds the two files. Afterwards the segment and the rows of the results are deleted.

What is durable when
--------------------

- A file, when its upload returns. A job, when `create_batch` returns.
- A line, when its transaction has committed. It counts in `request_counts` from then on, never before. The key of its
  row (job, line) makes it count once, even if a crash or a full disk has it committed twice.
- A job's part of the engine's time (engine_shares.py), with each of its commits, at its end, and when the server stops.
- Groups of suspects, before their lines run again.
- Not durable: lines in flight, and their partial outputs (in memory, for the next engine).

When the disk does not take a write, `StorageGuard` repeats it until it does. No line is started meanwhile.

When an engine dies
-------------------

Each line in flight may have killed it: these lines are suspects. They run again in groups, and while a group runs, no
other line does (bisect_suspects.py). A group that kills an engine is split; up to 16 lines run one by one. A line that
kills two engines while it runs alone gets an error line. A death with a known cause (a full disk, say) blames no line.
A line resumes from its partial output; after a death while it ran alone, it starts from the beginning.

When the server restarts
------------------------

`start` locks the directory, removes what a crash left (partial files, files and segments without a row), and drives
each job that has not ended from its status on. A segment is cut to its committed bytes. Lines with a row are done; all
others run, suspects in their groups.
"""
