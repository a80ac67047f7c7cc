//! The addresses of ranks: what each advertises, and the table of all of them.

pub(crate) mod address_table;
pub(crate) mod advertised;
