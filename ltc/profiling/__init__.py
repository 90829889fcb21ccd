"""Profiles of a run: spans of every thread, kernels of every launch, and the file they become.

`profile.py` is what users start; `support/observation/spans.py` keeps what happens meanwhile;
`trace.py` says it as the file does; `trace_file.py` writes that, and joins what several processes
tell; `holders.py` names what holds memory. `report.py` makes a page of it. What a kernel computes
its backend tells (`KernelFacts` in backends/capabilities.py), what the machine does at most
llvm/native/machine_limits.py.

The file is JSON as ui.perfetto.dev and chrome://tracing read it: an object with `traceEvents`, and
under `ltc` the same run as tables. Times are microseconds since the block began, of several
processes since the first began.

`traceEvents`, each with `ph`, `name`, `pid`, `tid`, `ts`; `cat` says what it is:

    ph X, a span, has `dur`:
      step        on a lane of its own for each thread that marks; args: step, record_us, compile_us,
                  wait_us, execute_us
      record      within a step: from the mark before to this one
      mark        the end of a step: what is pending is cut off and started; args: step
      cut         what is pending is started before, for a read; args: line
      compile     args: calls
      launch      one run of a program; args: program, tier, step, inline (in the thread that asked)
      kernel      within a launch; args: program, kernel (its position there), step, and where they are
                  known ops, line, forward, module, read_bytes, written_bytes, multiply_adds,
                  operations, copy_share, fma_share
      upload, download    args: bytes
      wait        a thread that waits for values, or for room
      collective  a wait for other replicas; args: kind, number, channel, bytes, line, started_us; in a
                  file of several ranks waited_for (the rank that came last, None: this one), waited_us.
                  A kernel that waits for a sum's operands has these args, too
      fallback    a call that runs eagerly; args: line
      call        of a function that ltc.compile has made, replayed or not: a step where none is marked
      closure, user, gc   step closures; Trace, StepTrace, record_function; Python's collector
    ph i, an instant, of cat compiles, recompiles, cuts, fallbacks, tiers, faults: an explanation; args: what,
                  difference, cure, reason, line, stack
    ph C, a counter: "live bytes ltc:0"; args: bytes
    ph M, metadata: process_name ("rank 1, pid 4711 on host"), process_sort_index (the rank),
                  thread_name, thread_sort_index

`ltc`:
    version     1; grows where something is renamed or removed
    processes   pid, rank, world_size, host, argv, threads, begin_us, end_us, versions {ltc, torch,
                python}, limits {copy_bytes_per_s, fma_per_s, threads, measured_at (seconds since the
                epoch), others_share (of the processors, meanwhile)} or None, modules (the class of each,
                by its path), counters (growth of those of ltc.debug.metrics), dropped (events beyond
                the most that are kept), clock
    programs    id ("pid:0", ...), pid, tier ("native", "interpreted", "op_by_op"), calls, launches,
                seconds, block_bytes, why, kernels: of each number, name, ops, line, forward, lines, module,
                modules, read_bytes, written_bytes, multiply_adds, operations, tasks, is_double,
                launches, seconds (of all launches), copy_share, fma_share (of its mean time)
    steps       pid, tid, number, begin_us, end_us, record_us (until the mark, without what follows),
                compile_us, wait_us, execute_us (in the step's own thread), peak_bytes
    memory      pid, device, peak_bytes, at_us, step, holders: of each bytes, shape, dtype, kind
                ("parameter", "gradient", "optimizer", "buffer", "input", "output", "block", "other"),
                name, line, module; largest first
    explanations  pid, ts, kind, what, difference, cure, reason, line, stack
    collectives   pid, ts, dur, name, and the args of their spans
    run         names the run whose processes write one file

What is not known is None, or missing in `args`; a line is "file.py:12 in function", "" where there
is none. `line` of a call that a backward makes is that of `backward()`, `forward` that of the call
it goes back from; `lines` has the latter. `multiply_adds` counts those of products, `operations`
the elementwise ones. A share is of the most that the machine does: 1.0 is its limit; a copy_share
above 1 tells that operands were in the caches.
"""
