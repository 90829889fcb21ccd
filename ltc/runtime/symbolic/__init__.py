"""Programs of recordings that come back at other sizes.

traced_end         how a path ends, with expressions for sizes
variant            the program for the sizes at which guards hold, made here or behind
interpreted_end    what runs it call by call at any sizes
program_of_sizes   how one end of a path is run at any sizes: guarded variants, and what they gave lately
"""
