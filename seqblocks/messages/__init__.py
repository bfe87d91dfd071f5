"""What the messages of many faults share: suggestions of words, descriptions of codes, the diagnosis of broken YAML.

The message of a fault itself is written next to the check that finds it. docs/messages.md shows all of them.
"""
