"""What a process is made of: its processors, threads, locks, signals, and the end of its parent."""
