//! Tests of the books: rules by example, random operations against a naive model, progress under pressure.

mod ahead;
mod bans;
mod capacity;
mod choice;
mod compare;
mod device;
mod engine;
mod handback;
mod life;
mod model;
mod model_moves;
mod model_step;
mod odd;
mod order;
mod progress;
mod random;
mod serving;
mod setup;
mod tables;
mod universe;
mod world;
