"""Programs of recordings that come back at other sizes.

program_of_sizes   how one end of a path is run at any sizes: guarded variants, and what they gave lately
"""
