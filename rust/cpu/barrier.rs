//! Where the threads of one piece of work meet: spinning for a moment, then asleep.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Looks at a barrier before a thread goes to sleep there: some 30 µs on AMD's Zen 4, some 100 µs where the processor's
/// pause is longer. Where a thread has no core of its own, spinning for longer would only keep others from theirs.
const SPINS: usize = 2_000;

/// One thread's part in a piece of work.
#[derive(Clone, Copy)]
pub(crate) struct Worker<'a> {
    /// Which of the threads this is, from 0.
    pub index: usize,
    pub(super) barrier: &'a Barrier,
}

impl Worker<'_> {
    /// Waits until every thread is here. What they wrote before can be read after.
    ///
    /// # Panics
    /// If another thread has panicked, as it will never come.
    pub(crate) fn meet(self) {
        self.barrier.meet();
    }
}

/// Where a number of threads wait for each other, as often as they like. It serves one piece of work.
pub(super) struct Barrier {
    count: usize,
    arrived: AtomicUsize,
    round: AtomicUsize,
    is_broken: AtomicBool,
    bed: Bed,
}

impl Barrier {
    pub(super) fn new(count: usize) -> Self {
        Self {
            count,
            arrived: AtomicUsize::new(0),
            round: AtomicUsize::new(0),
            is_broken: AtomicBool::new(false),
            bed: Bed::default(),
        }
    }

    fn meet(&self) {
        let round = self.round.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
            self.arrived.store(0, Ordering::Relaxed);
            self.round.store(round.wrapping_add(1), Ordering::SeqCst);
            self.bed.wake();
            return;
        }
        let is_over = || self.is_broken.load(Ordering::SeqCst) || self.round.load(Ordering::SeqCst) != round;
        if !spin_until(is_over) {
            self.bed.sleep_until(is_over);
        }
        assert!(!self.is_broken.load(Ordering::SeqCst), "another thread of this step has panicked");
    }

    /// Lets nobody wait for a thread that has panicked.
    pub(super) fn break_up(&self) {
        self.is_broken.store(true, Ordering::SeqCst);
        self.bed.wake();
    }
}

/// Looks for a moment whether something has happened, and says whether it has.
fn spin_until(has_happened: impl Fn() -> bool) -> bool {
    for _ in 0..SPINS {
        if has_happened() {
            return true;
        }
        spin_loop();
    }
    false
}

/// Where threads sleep until something has happened. While nobody does, waking them costs one look.
///
/// What happens is stored, and asked for, in sequentially consistent order: so either a sleeper sees it before it lies
/// down, or it is counted before `wake` looks.
#[derive(Default)]
pub(super) struct Bed {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    alarm: Condvar,
}

impl Bed {
    pub(super) fn sleep_until(&self, has_happened: impl Fn() -> bool) {
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !has_happened() {
            guard = wait(&self.alarm, guard);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes who sleeps, after something has happened.
    pub(super) fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.lock));
            self.alarm.notify_all();
        }
    }
}

/// Locks; a panic elsewhere left nothing half done under these locks.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_that_is_late_finds_the_others_asleep_and_wakes_them() {
        let barrier = Barrier::new(3);
        let passed = AtomicUsize::new(0);
        thread::scope(|scope| {
            for index in 0..3 {
                let (barrier, passed) = (&barrier, &passed);
                scope.spawn(move || {
                    while index == 1 && barrier.bed.sleepers.load(Ordering::SeqCst) < 2 {
                        thread::yield_now();
                    }
                    barrier.meet();
                    passed.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        assert_eq!(passed.into_inner(), 3);
        assert_eq!(barrier.bed.sleepers.into_inner(), 0);
    }

    #[test]
    fn whoever_sleeps_at_a_barrier_that_breaks_is_let_go_and_told() {
        let barrier = Barrier::new(3);
        thread::scope(|scope| {
            let waiting: Vec<_> =
                (0..2).map(|_| scope.spawn(|| catch_unwind(AssertUnwindSafe(|| barrier.meet())).is_err())).collect();
            while barrier.bed.sleepers.load(Ordering::SeqCst) < 2 {
                thread::yield_now();
            }
            barrier.break_up();
            for thread in waiting {
                assert!(thread.join().expect("it was caught"));
            }
        });
    }
}
