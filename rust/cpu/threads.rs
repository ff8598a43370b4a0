//! The threads that compute: asleep while nothing is posted, they go from one posted work to the next by themselves.

use std::any::Any;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::arch::asm;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};

use super::barrier::{Worker, lock, wait};
use super::queue::{Failure, Next, Outcome, Queue, Work, tell};

/// A fixed number of threads, started when they are first needed, so that a process may fork before.
pub struct Threads {
    count: usize,
    crew: Mutex<Option<Crew>>,
}

impl fmt::Debug for Threads {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} threads", self.count)
    }
}

impl Threads {
    /// `count` threads, none of them started yet.
    ///
    /// # Panics
    /// If `count` is 0.
    #[must_use]
    pub fn new(count: usize) -> Self {
        assert!(count > 0, "no thread computes nothing");
        Self { count, crew: Mutex::new(None) }
    }

    /// Number of threads.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Starts the threads, unless they run already.
    ///
    /// # Errors
    /// If the system starts no more; then none is left running.
    pub fn start(&self) -> io::Result<()> {
        let mut crew = lock(&self.crew);
        if crew.as_ref().is_none_or(|crew| crew.process != std::process::id()) {
            *crew = Some(Crew::start(self.count)?);
        }
        Ok(())
    }

    /// Ends the threads: work that has begun is done before, what has not begun fails.
    pub(crate) fn stop(&self) {
        drop(lock(&self.crew).take());
    }

    /// Lets each thread do its part of `work` once all that was posted before is done, and does not wait for it. Where
    /// one of `needed` has failed, it fails too.
    ///
    /// # Panics
    /// If the threads cannot be started: see `start`.
    pub(crate) fn post(&self, work: Arc<Work>, needed: &[Arc<Outcome>]) -> Arc<Outcome> {
        self.start().expect("who cannot be sure of it starts the threads first");
        lock(&self.crew).as_ref().expect("it was just started").shared.post(work, needed)
    }

    /// Lets each thread do its part of `work`, while the caller sleeps.
    ///
    /// # Panics
    /// If `work` does, on any thread, or the threads cannot be started: see `start`.
    pub(crate) fn run(&self, work: &(dyn Fn(Worker<'_>) + Sync)) {
        // SAFETY: only the lifetime changes. The threads use it until all have left it, and that is waited for below,
        // before anything here can return or unwind.
        let work = unsafe { std::mem::transmute::<&(dyn Fn(Worker<'_>) + Sync), Borrowed>(work) };
        // SAFETY: as above.
        let outcome = self.post(Arc::new(move |worker: Worker<'_>| unsafe { work.call(worker) }), &[]);
        if let Err(failure) = outcome.wait() {
            panic!("{failure}");
        }
    }

    /// In a forked child: lets go of the parent's threads, which are not there. False if they were computing at the
    /// fork; what they had in hand stays as it was for ever then.
    ///
    /// Waits for no lock, as its holder may be in the parent.
    pub(crate) fn survive_fork(&self) -> bool {
        let Ok(mut crew) = self.crew.try_lock() else { return false };
        let was_idle =
            crew.as_ref().is_none_or(|crew| crew.shared.orders.try_lock().is_ok_and(|orders| orders.queue.is_empty()));
        if was_idle {
            *crew = None;
        }
        was_idle
    }
}

/// Work of a caller who waits until it is done. It is kept by its address, as the crew lets go of it a little later.
#[repr(transparent)]
struct Borrowed(*const (dyn Fn(Worker<'_>) + Sync));

// SAFETY: the work may be used by several threads at once.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

impl Borrowed {
    /// # Safety
    /// The caller of `Threads::run` still waits.
    unsafe fn call(&self, worker: Worker<'_>) {
        // SAFETY: so the work is still there.
        unsafe { (*self.0)(worker) }
    }
}

/// Threads that are running.
struct Crew {
    process: u32,
    shared: Arc<CrewShared>,
    handles: Vec<JoinHandle<()>>,
}

struct CrewShared {
    orders: Mutex<Orders>,
    /// More work, the end, or that the last thread has left work that failed.
    changed: Condvar,
}

/// What the threads are to do.
struct Orders {
    queue: Queue,
    /// Threads that wait for `changed`.
    asleep: usize,
    is_over: bool,
}

impl Crew {
    fn start(count: usize) -> io::Result<Self> {
        let orders = Orders { queue: Queue::new(count), asleep: 0, is_over: false };
        let shared = Arc::new(CrewShared { orders: Mutex::new(orders), changed: Condvar::new() });
        // What was started ends with it.
        let mut crew = Self { process: std::process::id(), shared, handles: Vec::new() };
        for index in 0..count {
            let shared = Arc::clone(&crew.shared);
            let builder = thread::Builder::new().name(format!("reprieve-{index}"));
            crew.handles.push(builder.spawn(move || shared.serve(index))?);
        }
        Ok(crew)
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // In a forked child the parent's threads are not there, and whatever they held stays locked: what the
            // child knows of them is left alone for good.
            std::mem::forget((std::mem::take(&mut self.handles), Arc::clone(&self.shared)));
            return;
        }
        let mut orders = lock(&self.shared.orders);
        orders.is_over = true;
        orders.queue.close();
        drop(orders);
        self.shared.changed.notify_all();
        for handle in self.handles.drain(..) {
            // A thread only ends by its loop; a panic in its work was caught.
            drop(handle.join());
        }
    }
}

impl CrewShared {
    fn post(&self, work: Arc<Work>, needed: &[Arc<Outcome>]) -> Arc<Outcome> {
        let mut orders = lock(&self.orders);
        let outcome = orders.queue.push(work, needed);
        let is_any_asleep = orders.asleep > 0;
        drop(orders);
        if is_any_asleep {
            self.changed.notify_all();
        }
        outcome
    }

    /// The life of thread `index`: its part of one work after another, until the end.
    fn serve(&self, index: usize) {
        use_default_rounding();
        let mut number = 0;
        let mut orders = lock(&self.orders);
        loop {
            match orders.queue.next(number) {
                Next::Begin(part) => {
                    drop(orders);
                    let worker = Worker { index, barrier: &part.barrier };
                    let panic = catch_unwind(AssertUnwindSafe(|| (part.work)(worker))).err();
                    orders = lock(&self.orders);
                    if let Some(panic) = panic {
                        // The first is the cause: the others follow from the barrier, which is broken once this is kept.
                        orders.queue.fail(number, &Failure::panicked(message(&*panic)));
                    }
                }
                Next::Skip => {}
                Next::Nothing if orders.is_over => return,
                Next::Nothing | Next::Wait => {
                    orders.asleep += 1;
                    orders = wait(&self.changed, orders);
                    orders.asleep -= 1;
                    continue;
                }
            }
            if let Some(outcome) = orders.queue.leave(number) {
                drop(orders);
                if outcome.has_failed() {
                    self.changed.notify_all();
                }
                tell(&outcome);
                orders = lock(&self.orders);
            }
            number += 1;
        }
    }
}

/// What a panic says.
fn message(panic: &(dyn Any + Send)) -> &str {
    let owned = || panic.downcast_ref::<String>().map(String::as_str);
    panic.downcast_ref::<&str>().copied().or_else(owned).unwrap_or("for no reason in words")
}

/// Brings this thread's arithmetic to what IEEE 754 says. A thread inherits the modes of its maker, in which a library may
/// have had subnormal numbers taken for zeros; results would not be the same in every process.
fn use_default_rounding() {
    #[cfg(target_arch = "x86_64")]
    {
        /// Round to nearest, subnormals kept, no traps: how every process starts.
        static DEFAULT: u32 = 0x1f80;
        // SAFETY: these are the modes that Rust code may rely on.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const DEFAULT, options(nostack, readonly)) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above; zero is the default.
    unsafe {
        asm!("msr fpcr, {}", in(reg) 0_u64, options(nostack, nomem))
    };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_thread_sees_what_the_others_wrote_before_they_met() {
        for count in 1..=5 {
            let threads = Threads::new(count);
            for _ in 0..50 {
                let counters: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                threads.run(&|worker| {
                    for round in 1..=100 {
                        counters[worker.index].store(round, Ordering::Relaxed);
                        worker.meet();
                        assert!(counters.iter().all(|counter| counter.load(Ordering::Relaxed) == round));
                        worker.meet();
                    }
                });
            }
        }
    }

    /// Work that holds the threads up until the flag is set.
    fn gate(is_open: &Arc<AtomicBool>) -> Arc<Work> {
        let is_open = Arc::clone(is_open);
        Arc::new(move |_| {
            while !is_open.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        })
    }

    #[test]
    fn posted_work_is_done_in_order_while_the_caller_goes_on() {
        for count in 1..=4 {
            let threads = Threads::new(count);
            let is_open = Arc::new(AtomicBool::new(false));
            let mut outcomes = vec![threads.post(gate(&is_open), &[])];
            let done = Arc::new(AtomicUsize::new(0));
            for number in 0..200 {
                let done = Arc::clone(&done);
                let work = move |worker: Worker<'_>| {
                    // Nobody is here before all have done the work before.
                    assert!((number * count..(number + 1) * count).contains(&done.fetch_add(1, Ordering::SeqCst)));
                    worker.meet();
                };
                outcomes.push(threads.post(Arc::new(work), &[]));
            }
            assert!(outcomes.iter().all(|outcome| !outcome.is_over()));
            is_open.store(true, Ordering::SeqCst);
            for outcome in outcomes.iter().rev() {
                assert_eq!(outcome.wait(), Ok(()));
            }
            assert_eq!(done.load(Ordering::SeqCst), 200 * count);
        }
    }

    #[test]
    fn a_panic_on_one_thread_reaches_the_caller_and_leaves_no_thread_waiting() {
        let threads = Threads::new(3);
        for _ in 0..20 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                threads.run(&|worker| {
                    assert!(worker.index != 2, "broken on purpose");
                    worker.meet();
                });
            }));
            let panic = outcome.expect_err("it must arrive");
            assert_eq!(message(&*panic), "a thread of the device panicked: broken on purpose");
            let done = AtomicUsize::new(0);
            threads.run(&|worker| {
                worker.meet();
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 3);
        }
    }

    #[test]
    fn a_panic_fails_what_is_behind_it_and_nothing_that_is_posted_later() {
        let threads = Threads::new(3);
        for broken in 0..3 {
            let is_open = Arc::new(AtomicBool::new(false));
            let before = threads.post(gate(&is_open), &[]);
            let work = move |worker: Worker<'_>| {
                worker.meet();
                assert!(worker.index != broken, "broken on purpose");
                worker.meet();
            };
            let breaks = threads.post(Arc::new(work), &[]);
            let behind: Vec<_> = (0..3).map(|_| threads.post(Arc::new(|_| panic!("it must not begin")), &[])).collect();
            is_open.store(true, Ordering::SeqCst);
            assert_eq!(before.wait(), Ok(()));
            let failure = breaks.wait().expect_err("it broke");
            assert_eq!(failure.to_string(), "a thread of the device panicked: broken on purpose");
            for outcome in behind {
                let said = outcome.wait().expect_err("it was behind").to_string();
                assert_eq!(said, format!("a step before this one failed: {failure}"));
            }
            let sum = Arc::new(AtomicUsize::new(0));
            let added = Arc::clone(&sum);
            let later = threads.post(Arc::new(move |worker| _ = added.fetch_add(worker.index, Ordering::SeqCst)), &[]);
            assert_eq!(later.wait(), Ok(()));
            assert_eq!(sum.load(Ordering::SeqCst), 3);
            let needs_it = threads.post(Arc::new(|_| panic!("it must not begin")), &[later, breaks]);
            assert!(needs_it.wait().is_err());
        }
    }

    #[test]
    fn threads_that_are_dropped_end_what_has_begun_and_drop_the_rest() {
        let threads = Threads::new(2);
        let is_open = Arc::new(AtomicBool::new(false));
        let has_begun = Arc::new(AtomicBool::new(false));
        let (gate, begun) = (gate(&is_open), Arc::clone(&has_begun));
        let first = threads.post(
            Arc::new(move |worker| {
                begun.store(true, Ordering::SeqCst);
                gate(worker);
            }),
            &[],
        );
        let second = threads.post(Arc::new(|_| panic!("it must not begin")), &[]);
        while !has_begun.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        let dropping = thread::spawn(move || drop(threads));
        // The rest fails at once, and is over when the threads have come by.
        while !second.has_failed() {
            thread::yield_now();
        }
        is_open.store(true, Ordering::SeqCst);
        dropping.join().expect("it passes");
        assert_eq!(first.wait(), Ok(()));
        assert!(second.is_over());
        assert_eq!(
            second.wait().expect_err("it had not begun").to_string(),
            "the device was closed before it computed this step"
        );
    }

    #[test]
    fn threads_take_no_rounding_from_their_maker() {
        let threads = Threads::new(2);
        thread::spawn(move || {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: subnormals are taken for zeros on this thread alone, which ends soon and computes nothing.
            unsafe {
                static FLUSH: u32 = 0x1f80 | 0x8040;
                asm!("ldmxcsr [{}]", in(reg) &raw const FLUSH, options(nostack, readonly));
            }
            let subnormal = AtomicUsize::new(0);
            threads.run(&|_| {
                let half = std::hint::black_box(f32::MIN_POSITIVE) * std::hint::black_box(0.5);
                subnormal.fetch_add(usize::from(half > 0.0), Ordering::Relaxed);
            });
            assert_eq!(subnormal.into_inner(), 2);
        })
        .join()
        .expect("it passes");
    }
}
