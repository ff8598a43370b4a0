//! Tests of the books: rules by example, random operations against a naive model, progress under pressure.

mod capacity;
mod choice;
mod device;
mod engine;
mod handback;
mod model;
mod model_step;
mod odd;
mod order;
mod progress;
mod random;
mod setup;
mod tables;
mod world;
