"""A file of a user with one mistake in each line that says so: type checkers must find all of them. It is not run."""

import kyklos

kyklos.Group.local("2")  # mistake
kyklos.run_local(2, lambda group: group.ranks)  # mistake
group = kyklos.Group.local(1)[0]
group.attend(0, 0, 0, masc="causal")  # mistake
group.attend(0, 0, 0, mask=1)  # mistake
group.rank = 1  # mistake
name: int = group.device  # mistake
