//! Integer arguments, refused by name.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// An integer argument; one of the wrong kind or size is named, with what it may be.
#[derive(Clone, Copy)]
pub(super) struct Whole<T>(pub(super) T);

impl<'a, 'py, T> FromPyObject<'a, 'py> for Whole<T>
where
    T: FromPyObjectOwned<'py> + Bounded,
{
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        object.extract().map(Self).map_err(|_| {
            let shown = object.repr().map(|repr| repr.to_string()).unwrap_or_default();
            // PyO3 puts the argument's name in front of a `TypeError`.
            PyTypeError::new_err(format!("must be an integer from {} to {}, not {shown}", T::LEAST, T::MOST))
        })
    }
}

/// The bounds of an integer type, to be named in an error.
pub(super) trait Bounded {
    const LEAST: i64;
    const MOST: u64;
}

impl Bounded for u32 {
    const LEAST: i64 = 0;
    const MOST: u64 = u32::MAX as u64;
}

impl Bounded for u64 {
    const LEAST: i64 = 0;
    const MOST: u64 = u64::MAX;
}

impl Bounded for i32 {
    const LEAST: i64 = i32::MIN as i64;
    const MOST: u64 = i32::MAX as u64;
}

impl Bounded for usize {
    const LEAST: i64 = 0;
    const MOST: u64 = usize::MAX as u64;
}
