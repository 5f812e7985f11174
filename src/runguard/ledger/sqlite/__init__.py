"""SQLite as a store: one file, no server. Many processes of one machine share it.

``backend`` reads the URL, ``connection`` opens the file and runs transactions, ``holds`` reserves and settles,
``session`` has the other operations, ``writer_queue`` queues the writers of all processes so that none starves.
"""
