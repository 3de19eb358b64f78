"""The sidecar: it starts a run outside the training process, sees when it is stuck, says why, and brings it back.

Decision: a separate process that reads files (heartbeats, log, /proc) and never shares an interpreter with the
training, because whatever stops the trainer (a held GIL, a dead GPU, SIGSTOP) must not stop the one who is to notice.
The watching process imports the standard library, psutil only off Linux, and nothing else, so that it stays under 40
MB; what needs more (rendering a script, verifying a checkpoint, mails) runs in short-lived helpers with deadlines.
"""
