//! Work that a crew does in the order in which it was posted: who may begin which, and when each is over.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::barrier::{Barrier, Bed, Worker};

/// What every thread of a crew does its part of.
pub(crate) type Work = dyn Fn(Worker<'_>) + Send + Sync;

/// Why work was not done, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(String);

impl Failure {
    /// A thread has panicked with `message`.
    pub(super) fn panicked(message: &str) -> Self {
        Self(format!("a thread of the device panicked: {message}"))
    }

    /// It was to be done when the crew ended.
    fn closed() -> Self {
        Self("the device was closed before it computed this step".into())
    }

    /// It came after work that failed for this reason.
    fn behind(&self) -> Self {
        let reason = self.0.trim_start_matches(BEHIND);
        Self(format!("{BEHIND}{reason}"))
    }
}

const BEHIND: &str = "a step before this one failed: ";

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

/// What posted work comes to.
#[derive(Default)]
pub(crate) struct Outcome {
    failure: OnceLock<Failure>,
    is_over: AtomicBool,
    bed: Bed,
}

impl fmt::Debug for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "over: {}, failure: {:?}", self.is_over(), self.failure.get())
    }
}

impl Outcome {
    /// Whether every thread has left the work: nothing of it is touched any more.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Waits until the work is over. Takes no lock if it is.
    pub(crate) fn wait(&self) -> Result<(), Failure> {
        if !self.is_over() {
            self.bed.sleep_until(|| self.is_over());
        }
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Whether it has failed; the threads may still be on their way out of it.
    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Keeps the first reason only.
    fn fail(&self, failure: Failure) {
        let _ = self.failure.set(failure);
    }
}

/// Work in a queue.
struct Entry {
    work: Arc<Work>,
    barrier: Arc<Barrier>,
    outcome: Arc<Outcome>,
    has_begun: bool,
    /// Threads that have left it.
    left: usize,
}

/// One thread's part of what it is to do next.
pub(super) struct Part {
    pub(super) work: Arc<Work>,
    pub(super) barrier: Arc<Barrier>,
}

/// What a thread does next.
pub(super) enum Next {
    /// Its part of some work.
    Begin(Part),
    /// Nothing of this work, as it has failed: leave it.
    Skip,
    /// It asks again when all have left the work that failed.
    Wait,
    /// Nothing is posted that it has not left.
    Nothing,
}

/// Posted work that is not over. Each thread goes through all of it in order, at its own pace: it takes `next`, and
/// leaves that before it asks again. Numbers count from 0, which is the first work of all.
pub(super) struct Queue {
    num_threads: usize,
    /// Number of the front entry.
    first: u64,
    entries: VecDeque<Entry>,
}

impl Queue {
    pub(super) fn new(num_threads: usize) -> Self {
        Self { num_threads, first: 0, entries: VecDeque::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Appends `work`. It fails at once where one of `needed` has failed: what it needs is not there.
    pub(super) fn push<'a>(
        &mut self,
        work: Arc<Work>,
        needed: impl IntoIterator<Item = &'a Arc<Outcome>>,
    ) -> Arc<Outcome> {
        let outcome = Arc::new(Outcome::default());
        if let Some(failure) = needed.into_iter().find_map(|outcome| outcome.failure.get()) {
            outcome.fail(failure.behind());
        }
        let barrier = Arc::new(Barrier::new(self.num_threads));
        self.entries.push_back(Entry { work, barrier, outcome: Arc::clone(&outcome), has_begun: false, left: 0 });
        outcome
    }

    /// What a thread does that has left all work before `number`.
    ///
    /// Work may begin while other threads are still on their way out of the work before it. Not so if that has failed:
    /// they may be in the middle of it, as nobody met them at its end.
    pub(super) fn next(&mut self, number: u64) -> Next {
        let index = self.index(number);
        if index >= self.entries.len() {
            return Next::Nothing;
        }
        if self.entries.range(..index).any(|entry| entry.outcome.has_failed()) {
            return Next::Wait;
        }
        let entry = &mut self.entries[index];
        if entry.outcome.has_failed() {
            return Next::Skip;
        }
        entry.has_begun = true;
        Next::Begin(Part { work: Arc::clone(&entry.work), barrier: Arc::clone(&entry.barrier) })
    }

    /// One thread is done with `number`. Returns its outcome if that was the last thread: then it is over, and whoever
    /// sleeps for it is to be woken by [`tell`].
    pub(super) fn leave(&mut self, number: u64) -> Option<Arc<Outcome>> {
        let index = self.index(number);
        let entry = &mut self.entries[index];
        entry.left += 1;
        if entry.left < self.num_threads {
            return None;
        }
        assert_eq!(index, 0, "each thread leaves work in order");
        let outcome = self.entries.pop_front().expect("it was just left").outcome;
        self.first += 1;
        outcome.is_over.store(true, Ordering::SeqCst);
        Some(outcome)
    }

    /// `number` has failed, and with it all that was posted behind it. Nobody waits at their barriers any more.
    pub(super) fn fail(&mut self, number: u64, failure: &Failure) {
        let index = self.index(number);
        if self.entries[index].outcome.has_failed() {
            return; // the other threads of broken work panic too: what was posted since then is not behind it
        }
        for (behind, entry) in self.entries.range(index..).enumerate() {
            entry.outcome.fail(if behind == 0 { failure.clone() } else { failure.behind() });
            entry.barrier.break_up();
        }
    }

    /// Lets all that has not begun fail.
    pub(super) fn close(&mut self) {
        for entry in self.entries.iter().filter(|entry| !entry.has_begun) {
            entry.outcome.fail(Failure::closed());
        }
    }

    fn index(&self, number: u64) -> usize {
        usize::try_from(number - self.first).expect("what is not over is in memory")
    }
}

/// Wakes whoever waits for work that is over. Apart from `Queue::leave`, so that no lock is held meanwhile.
pub(super) fn tell(outcome: &Outcome) {
    outcome.bed.wake();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(entries: usize) -> (Queue, Vec<Arc<Outcome>>) {
        let mut queue = Queue::new(2);
        let outcomes = (0..entries).map(|_| queue.push(Arc::new(|_| ()), [])).collect();
        (queue, outcomes)
    }

    fn begins(queue: &mut Queue, number: u64) -> bool {
        matches!(queue.next(number), Next::Begin(_))
    }

    #[test]
    fn a_thread_begins_the_next_work_while_another_is_in_the_one_before() {
        let (mut queue, outcomes) = queue(2);
        assert!(begins(&mut queue, 0) && begins(&mut queue, 0));
        assert!(queue.leave(0).is_none());
        assert!(begins(&mut queue, 1));
        assert!(!outcomes[0].is_over());
        assert!(queue.leave(0).is_some_and(|outcome| Arc::ptr_eq(&outcome, &outcomes[0])));
        assert!(outcomes[0].is_over() && !outcomes[1].is_over());
        assert!(queue.leave(1).is_none() && begins(&mut queue, 1));
        assert!(matches!(queue.next(2), Next::Nothing));
        assert!(queue.leave(1).is_some());
        assert!(queue.is_empty());
        assert_eq!(outcomes[1].wait(), Ok(()));
    }

    #[test]
    fn a_failure_takes_along_what_was_posted_behind_it_and_nothing_else_begins_until_all_have_left() {
        let (mut queue, outcomes) = queue(3);
        assert!(begins(&mut queue, 0) && begins(&mut queue, 0));
        queue.leave(0);
        assert!(begins(&mut queue, 1) && queue.leave(0).is_some());
        // One thread panics in the second while the other has not come there.
        queue.fail(1, &Failure::panicked("on purpose"));
        let later = queue.push(Arc::new(|_| ()), []);
        queue.fail(1, &Failure::panicked("another"));
        assert!(queue.leave(1).is_none());
        assert!(matches!(queue.next(2), Next::Wait), "the other may be in the middle of it");
        assert!(matches!(queue.next(1), Next::Skip));
        assert!(queue.leave(1).is_some());
        for _ in 0..2 {
            assert!(matches!(queue.next(2), Next::Skip));
            queue.leave(2);
        }
        assert!(begins(&mut queue, 3) && begins(&mut queue, 3));
        queue.leave(3);
        queue.leave(3);
        let said = |outcome: &Outcome| outcome.wait().map_err(|failure| failure.to_string());
        assert_eq!(said(&outcomes[0]), Ok(()));
        assert_eq!(said(&outcomes[1]), Err("a thread of the device panicked: on purpose".into()));
        let behind = "a step before this one failed: a thread of the device panicked: on purpose";
        assert_eq!(said(&outcomes[2]), Err(behind.into()));
        assert_eq!(said(&later), Ok(()));
        let needs_it = queue.push(Arc::new(|_| ()), [&later, &outcomes[2]]);
        assert!(matches!(queue.next(4), Next::Skip));
        queue.leave(4);
        queue.leave(4);
        assert_eq!(said(&needs_it), Err(behind.into()));
    }

    #[test]
    fn what_has_begun_when_the_crew_ends_is_done_and_the_rest_is_not() {
        let (mut queue, outcomes) = queue(2);
        assert!(begins(&mut queue, 0));
        queue.close();
        assert!(begins(&mut queue, 0));
        for _ in 0..2 {
            queue.leave(0);
        }
        for _ in 0..2 {
            assert!(matches!(queue.next(1), Next::Skip));
            queue.leave(1);
        }
        assert_eq!(outcomes[0].wait(), Ok(()));
        assert_eq!(outcomes[1].wait(), Err(Failure::closed()));
    }
}
