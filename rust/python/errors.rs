//! The one mapping from refusals to the classes in `errors.py`.

use pyo3::PyErr;

use crate::error::{BooksError, Problem};

pyo3::import_exception!(reprieve.errors, BooksMisused);
pyo3::import_exception!(reprieve.errors, CannotPark);
pyo3::import_exception!(reprieve.errors, InvalidArgument);
pyo3::import_exception!(reprieve.errors, KvExhausted);
pyo3::import_exception!(reprieve.errors, NeverFits);
pyo3::import_exception!(reprieve.errors, RequestFinished);
pyo3::import_exception!(reprieve.errors, StepInFlight);
pyo3::import_exception!(reprieve.errors, UnknownRequest);

impl From<BooksError> for PyErr {
    fn from(error: BooksError) -> Self {
        match error {
            BooksError::Exhausted(shortage) => KvExhausted::new_err((shortage.needed, shortage.free)),
            BooksError::Invalid { field, problem: Problem::NeverFits { needed, total } } => {
                NeverFits::new_err((field, needed, total))
            }
            BooksError::Invalid { field, problem } => InvalidArgument::new_err((field, problem.to_string())),
            BooksError::Unknown(seq) => UnknownRequest::new_err((seq.0,)),
            BooksError::Finished(seq) => RequestFinished::new_err((seq.0,)),
            BooksError::InFlight(seq) => StepInFlight::new_err((seq.0,)),
            BooksError::CannotPark(seq, why) => CannotPark::new_err((seq.0, why.to_string())),
            BooksError::Misused(what) => BooksMisused::new_err((what,)),
        }
    }
}
