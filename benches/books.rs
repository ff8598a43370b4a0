//! Cost of one decode step in the books.

fn main() {}
