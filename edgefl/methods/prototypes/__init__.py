"""Class prototypes: computed on devices, merged on the server, used as stand-ins and as teachers."""
