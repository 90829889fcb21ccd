"""Events, as they are counted, timed and kept: leaves that every layer uses.

metrics, often   counters and times; counters of events at every call
metrics_saver    a file that gets them at each step
profiler         named regions of the user's program
spans            the activity of every thread, while a profile is open
"""
