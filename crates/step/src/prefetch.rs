//! Schedules computed ahead of time, in a thread of their own, while the step before them trains.

use crate::arm::Arm;
use crate::error::StepError;
use crate::scheduler::StepScheduler;
use dflop_types::{SampleIndex, Schedule};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A job's name: the step and the arm.
pub type JobKey = (u64, Arm);

/// Made anew for each job: says when its wall limit has passed. This crate reads no clock.
pub type WallLimit = Box<dyn Fn() -> Box<dyn Fn() -> bool> + Send>;

/// Owns a [`StepScheduler`] in a thread; [`Prefetch::submit`] returns at once, [`Prefetch::take_within`] waits.
///
/// Dropping it stops the job under way at its best so far, and leaves the others undone.
#[derive(Debug)]
pub struct Prefetch {
    jobs: Option<Sender<(JobKey, Vec<SampleIndex>)>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    is_cancelled: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// `None` while the job waits or runs.
    jobs: HashMap<JobKey, Option<Result<Schedule, StepError>>>,
    /// The thread has ended, by panic or by cancellation: nobody will answer.
    has_ended: bool,
}

impl Shared {
    // A panic under the lock can only come from the allocator; the state is whole at every await point.
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says that the thread has ended, also when it unwinds.
struct EndMark(Arc<Shared>);

impl Drop for EndMark {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}

impl Prefetch {
    /// The thread, started, with nothing to do yet.
    ///
    /// # Errors
    /// [`StepError::Thread`] if the system starts no more threads.
    pub fn new(scheduler: Arc<StepScheduler>, wall_limit: WallLimit) -> Result<Self, StepError> {
        let shared = Arc::new(Shared::default());
        let (jobs, queue) = channel::<(JobKey, Vec<SampleIndex>)>();
        let mark = EndMark(Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("dflop-schedule".to_owned())
            .spawn(move || {
                let mark = mark;
                while let Ok((key, samples)) = queue.recv() {
                    let is_cancelled = || mark.0.is_cancelled.load(Ordering::Relaxed);
                    if is_cancelled() {
                        return;
                    }
                    let is_over = wall_limit();
                    let stop = || is_cancelled() || is_over();
                    let answer = scheduler.schedule_until(key.0, &samples, key.1, &stop);
                    mark.0.lock().jobs.insert(key, Some(answer));
                    mark.0.changed.notify_all();
                }
            })
            .map_err(|error| StepError::Thread { cause: error.to_string() })?;
        Ok(Self { jobs: Some(jobs), shared, thread: Some(thread) })
    }

    /// Queues the global batch of `key`. A key that is already queued is not changed.
    pub fn submit(&self, key: JobKey, samples: Vec<SampleIndex>) {
        let mut state = self.shared.lock();
        if state.jobs.contains_key(&key) {
            return;
        }
        state.jobs.insert(key, None);
        drop(state);
        if let Some(jobs) = &self.jobs {
            // A send fails only after the thread has ended, which `take_within` reports.
            let _ = jobs.send((key, samples));
        }
    }

    /// The schedule of `key`, once; `None` if it is not there after `wait`: it can be asked for again.
    ///
    /// # Errors
    /// What [`StepScheduler::schedule`] answered; [`StepError::NotSubmitted`] for a key that was never queued
    /// or was taken before; [`StepError::Thread`] if the thread has ended.
    pub fn take_within(&self, key: JobKey, wait: Duration) -> Result<Option<Schedule>, StepError> {
        let is_awaited = |state: &mut State| matches!(state.jobs.get(&key), Some(None)) && !state.has_ended;
        let (mut state, _) = (self.shared.changed)
            .wait_timeout_while(self.shared.lock(), wait, is_awaited)
            .unwrap_or_else(PoisonError::into_inner);
        match state.jobs.get(&key) {
            None => Err(StepError::NotSubmitted { step: key.0 }),
            Some(None) if state.has_ended => {
                Err(StepError::Thread { cause: "it has ended before its answer".to_owned() })
            }
            Some(None) => Ok(None),
            Some(Some(_)) => state.jobs.remove(&key).flatten().transpose(),
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.shared.is_cancelled.store(true, Ordering::Relaxed);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its panic was reported by `take_within`; a drop has nobody to tell.
            let _ = thread.join();
        }
    }
}
