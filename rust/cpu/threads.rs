//! The threads that compute a step: asleep between steps, meeting at short barriers within one.

use std::any::Any;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::arch::asm;
use std::fmt;
use std::hint::spin_loop;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

/// Looks at a barrier before a thread goes to sleep there: some 30 µs on AMD's Zen 4, some 100 µs where the processor's
/// pause is longer. Where a thread has no core of its own, spinning for longer would only keep others from theirs.
const SPINS: usize = 2_000;

/// One thread's part in a piece of work.
#[derive(Clone, Copy)]
pub(crate) struct Worker<'a> {
    /// Which of the threads this is, from 0.
    pub index: usize,
    barrier: &'a Barrier,
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

/// Work that every thread does its part of.
type Work<'a> = dyn Fn(Worker<'_>) + Sync + 'a;

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

    /// Lets each thread do its part of `work`, while the caller sleeps. One caller at a time; others wait.
    ///
    /// # Panics
    /// If `work` does, on any thread, or the threads cannot be started: see `start`.
    pub(crate) fn run(&self, work: &Work<'_>) {
        self.start().expect("who cannot be sure of it starts the threads first");
        let outcome = lock(&self.crew).as_ref().expect("it was just started").run(work);
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
    }
}

/// Threads that are running.
struct Crew {
    process: u32,
    shared: Arc<CrewShared>,
    handles: Vec<JoinHandle<()>>,
}

struct CrewShared {
    order: Mutex<Order>,
    /// A new order, or the end.
    posted: Condvar,
    /// The last thread has done its part.
    done: Condvar,
    barrier: Barrier,
}

/// What the threads are to do.
struct Order {
    number: u64,
    /// Alive as long as `running` is not 0, as `run` waits for that.
    work: Option<&'static Work<'static>>,
    running: usize,
    panic: Option<Box<dyn Any + Send>>,
    is_over: bool,
}

impl Crew {
    fn start(count: usize) -> io::Result<Self> {
        let order = Order { number: 0, work: None, running: 0, panic: None, is_over: false };
        let shared = Arc::new(CrewShared {
            order: Mutex::new(order),
            posted: Condvar::new(),
            done: Condvar::new(),
            barrier: Barrier::new(count),
        });
        // What was started ends with it.
        let mut crew = Self { process: std::process::id(), shared, handles: Vec::new() };
        for index in 0..count {
            let shared = Arc::clone(&crew.shared);
            let builder = thread::Builder::new().name(format!("reprieve-{index}"));
            crew.handles.push(builder.spawn(move || shared.serve(index))?);
        }
        Ok(crew)
    }

    fn run(&self, work: &Work<'_>) -> Result<(), Box<dyn Any + Send>> {
        // SAFETY: the threads use it only until the last has done its part, and that is waited for below, before
        // anything here can return or unwind.
        let work: &'static Work<'static> = unsafe { std::mem::transmute(work) };
        let shared = &*self.shared;
        shared.barrier.reset();
        let mut order = lock(&shared.order);
        order.number += 1;
        order.work = Some(work);
        order.running = self.handles.len();
        shared.posted.notify_all();
        while order.running > 0 {
            order = wait(&shared.done, order);
        }
        order.work = None;
        order.panic.take().map_or(Ok(()), Err)
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
        lock(&self.shared.order).is_over = true;
        self.shared.posted.notify_all();
        for handle in self.handles.drain(..) {
            // A thread only ends by its loop; a panic in its work was handed to the caller.
            drop(handle.join());
        }
    }
}

impl CrewShared {
    /// The life of thread `index`: one order after another until the end.
    fn serve(&self, index: usize) {
        use_default_rounding();
        let mut last = 0;
        loop {
            let mut order = lock(&self.order);
            while order.number == last && !order.is_over {
                order = wait(&self.posted, order);
            }
            if order.is_over {
                return;
            }
            last = order.number;
            let work = order.work.expect("an order has work until every thread has done it");
            drop(order);
            let outcome = catch_unwind(AssertUnwindSafe(|| work(Worker { index, barrier: &self.barrier })));
            if let Err(panic) = outcome {
                // The first is the cause: the others follow from the barrier, which is broken once this is kept.
                lock(&self.order).panic.get_or_insert(panic);
                self.barrier.break_up();
            }
            let mut order = lock(&self.order);
            order.running -= 1;
            if order.running == 0 {
                self.done.notify_one();
            }
        }
    }
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

/// Where threads wait for each other: spinning for a moment, then asleep.
struct Barrier {
    count: usize,
    arrived: AtomicUsize,
    round: AtomicUsize,
    sleepers: AtomicUsize,
    is_broken: AtomicBool,
    bed: Mutex<()>,
    alarm: Condvar,
}

impl Barrier {
    fn new(count: usize) -> Self {
        Self {
            count,
            arrived: AtomicUsize::new(0),
            round: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            is_broken: AtomicBool::new(false),
            bed: Mutex::new(()),
            alarm: Condvar::new(),
        }
    }

    /// For new work, when no thread is inside: what broken work left is forgotten.
    fn reset(&self) {
        self.arrived.store(0, Ordering::Relaxed);
        self.sleepers.store(0, Ordering::Relaxed);
        self.is_broken.store(false, Ordering::Relaxed);
    }

    fn meet(&self) {
        let round = self.round.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
            self.arrived.store(0, Ordering::Relaxed);
            // Either a sleeper sees the new round before it lies down, or it is counted before this looks.
            self.round.store(round.wrapping_add(1), Ordering::SeqCst);
            self.wake();
            return;
        }
        for _ in 0..SPINS {
            if self.is_past(round) {
                return;
            }
            spin_loop();
        }
        let mut bed = lock(&self.bed);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !self.is_past(round) {
            bed = wait(&self.alarm, bed);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Lets nobody wait for a thread that has panicked.
    fn break_up(&self) {
        self.is_broken.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.bed));
            self.alarm.notify_all();
        }
    }

    fn is_past(&self, round: usize) -> bool {
        assert!(!self.is_broken.load(Ordering::SeqCst), "another thread of this step has panicked");
        self.round.load(Ordering::SeqCst) != round
    }
}

/// Locks; a panic elsewhere left nothing half done under these locks.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_thread_that_is_late_finds_the_others_asleep_and_wakes_them() {
        let threads = Threads::new(3);
        let passed = AtomicUsize::new(0);
        let is_asleep = |worker: Worker<'_>| worker.barrier.sleepers.load(Ordering::SeqCst) == 2;
        threads.run(&|worker| {
            if worker.index == 1 {
                while !is_asleep(worker) {
                    thread::yield_now();
                }
            }
            worker.meet();
            passed.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(passed.into_inner(), 3);
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
            assert_eq!(panic.downcast_ref(), Some(&"broken on purpose"));
            let done = AtomicUsize::new(0);
            threads.run(&|worker| {
                worker.meet();
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 3);
        }
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
