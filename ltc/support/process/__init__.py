"""Parts of a process: processors, threads, locks, signals, private folder, the end of its parent."""
