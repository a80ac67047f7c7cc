//! The `kyklos` program from outside: what it prints, writes, refuses and leaves behind.

mod attend;
mod demonstration;
mod files;
mod launch;
mod requests;
mod support;
