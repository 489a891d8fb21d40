"""A program that dies as one does whose kernels were made for another CPU."""

import os
import signal

os.kill(os.getpid(), signal.SIGILL)
