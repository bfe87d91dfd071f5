"""How each combinator is lowered: its steps become bodies, and its node is made of them. Imported when one is used."""
