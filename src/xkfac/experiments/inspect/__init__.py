"""What a memory file holds: spectra, traces and entries of its blocks.

A memory comes in; tables of numbers per unit go out.
"""
