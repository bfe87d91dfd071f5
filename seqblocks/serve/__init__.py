"""A page to edit a spec, with its picture, counts and problems as one types. No torch is needed."""
