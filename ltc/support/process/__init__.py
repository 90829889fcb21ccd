"""What a process is made of: its processors, threads, locks, signals, private folder, and the end of its
parent."""
