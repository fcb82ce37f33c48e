"""Stores whose runs are documents: one algorithm for files and for key-value stores.

No transaction spans several documents, so correctness depends on the order of writes. Every run has
a *head*, and replacing the head is the write that counts:

1. A wake line is written before the head that makes it true, in the queue and with the workflow and
   version of that head. A line only says where to look, so a line that is out of date is harmless;
   a run without a line would never be found.
2. Whatever a new head refers to is written before it.
3. Whatever the old head referred to is removed after it. Nothing reads it any longer, whether the
   process lives long enough to remove it or not.

A crash between any two writes leaves the run as it was before or as it is after.

A `Storage` provides the single writes. Where it cannot lock a run against other processes, a write
reports that the head was changed in the meantime and the algorithm starts over.
"""
