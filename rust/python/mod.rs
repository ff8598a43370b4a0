//! The `_native` module: check, lock, call, map errors. Nothing here decides anything.

mod arrays;
mod cpu_device;
mod cpu_model;
mod cpu_step;
mod errors;
mod ledger;
mod whole;

use pyo3::prelude::*;

/// Native part of reprieve.
#[pymodule(name = "_native")]
mod native {
    #[pymodule_export]
    use super::cpu_device::{PyCpuDevice, cpu_instructions};
    #[pymodule_export]
    use super::cpu_model::PyCpuModel;
    #[pymodule_export]
    use super::ledger::PyLedger;

    /// Version of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
