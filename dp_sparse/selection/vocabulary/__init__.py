"""A vocabulary of private columns: values that many examples have, found without telling of one."""
