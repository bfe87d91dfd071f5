"""What an editor shows of a spec and offers to change: functions of its analysis, without torch and without a protocol.

Only server.py knows the protocol of language servers, and imports pygls. All other files use the positions of
seqblocks: lines and columns from 1, columns in characters.
"""
