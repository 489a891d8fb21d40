"""What machine this is, how busy it is, and which part of it each actor gets.

Cores are logical CPUs by the numbers `taskset` uses. What the platform does not tell is left empty.
"""
