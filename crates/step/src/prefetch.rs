//! Schedules computed ahead of time, in a thread of their own, while the step before them trains.

use crate::adapt::adjustment::Adjustment;
use crate::arm::Arm;
use crate::error::StepError;
use crate::scheduler::{StepScheduler, Stop};
use dflop_types::{SampleIndex, Schedule};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// What names a job: its step and its arm.
pub type JobKey = (u64, Arm);

/// Called at the start of each job. The function that it gives says whether the job's time limit has passed. The caller
/// provides it, because this crate reads no clock.
pub type WallLimit = Box<dyn Fn() -> Box<dyn Fn() -> bool> + Send>;

/// What a schedule is made of.
#[derive(Debug, Clone, Default)]
pub struct Job {
    /// The global batch, in arrival order.
    pub samples: Vec<SampleIndex>,
    /// Corrects the predicted times; the default changes nothing.
    pub adjustment: Adjustment,
    /// Whether the same batch is also scheduled without the adjustment, to see what the adjustment saves.
    pub is_compared: bool,
}

/// A schedule, and the adjustment with which it was made.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The schedule; with an adjustment, its predicted makespan is the corrected one.
    pub schedule: Schedule,
    /// The adjustment of the job.
    pub adjustment: Adjustment,
    /// Two corrected makespans of the same batch in nanoseconds: scheduled without the adjustment, and with it. `None` if
    /// the job did not ask for them.
    pub compared_ns: Option<(u64, u64)>,
}

/// Owns a [`StepScheduler`] in a thread; [`Prefetch::submit`] returns at once, [`Prefetch::take_within`] waits.
///
/// Dropping it ends the job under way with the best schedule so far. Jobs that have not begun are not done.
#[derive(Debug)]
pub struct Prefetch {
    jobs: Option<Sender<(JobKey, Job)>>,
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
    jobs: HashMap<JobKey, Option<Result<Answer, StepError>>>,
    /// The thread has ended, by panic or by cancellation: nobody will answer.
    has_ended: bool,
}

impl Shared {
    // A poisoned lock can be used: only the allocator can panic under the lock, and the state is complete at every wait.
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notes that the thread has ended, when it is dropped: so also if the thread panics.
struct EndMark(Arc<Shared>);

impl Drop for EndMark {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}

impl Prefetch {
    /// Starts the thread; it has nothing to do yet.
    ///
    /// # Errors
    /// [`StepError::Thread`] if the system starts no more threads.
    pub fn new(scheduler: Arc<StepScheduler>, wall_limit: WallLimit) -> Result<Self, StepError> {
        let shared = Arc::new(Shared::default());
        let (jobs, queue) = channel::<(JobKey, Job)>();
        let mark = EndMark(Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("dflop-schedule".to_owned())
            .spawn(move || {
                let mark = mark;
                while let Ok((key, job)) = queue.recv() {
                    let is_cancelled = || mark.0.is_cancelled.load(Ordering::Relaxed);
                    if is_cancelled() {
                        return;
                    }
                    let is_over = wall_limit();
                    let stop = || is_cancelled() || is_over();
                    let answer = answer(&scheduler, key, job, &stop);
                    mark.0.lock().jobs.insert(key, Some(answer));
                    mark.0.changed.notify_all();
                }
            })
            .map_err(|error| StepError::Thread { cause: error.to_string() })?;
        Ok(Self { jobs: Some(jobs), shared, thread: Some(thread) })
    }

    /// Queues the global batch of `key`. A key that is already queued is not changed.
    pub fn submit(&self, key: JobKey, job: Job) {
        let mut state = self.shared.lock();
        if state.jobs.contains_key(&key) {
            return;
        }
        state.jobs.insert(key, None);
        drop(state);
        if let Some(jobs) = &self.jobs {
            // A send fails only after the thread has ended, which `take_within` reports.
            let _ = jobs.send((key, job));
        }
    }

    /// Takes the schedule of `key`, which works once. `None` if it is not there after `wait`: then ask again.
    ///
    /// # Errors
    /// What [`StepScheduler::schedule`] or [`StepScheduler::adjusted`] answered; [`StepError::NotSubmitted`] for a key that was never queued
    /// or was taken before; [`StepError::Thread`] if the thread has ended.
    pub fn take_within(&self, key: JobKey, wait: Duration) -> Result<Option<Answer>, StepError> {
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

fn answer(scheduler: &StepScheduler, key: JobKey, job: Job, halt: Stop) -> Result<Answer, StepError> {
    let Job { samples, adjustment, is_compared } = job;
    let (step, arm) = key;
    if adjustment.is_nothing() {
        let schedule = scheduler.schedule_until(step, &samples, arm, halt)?;
        let compared_ns =
            is_compared.then_some((schedule.predicted_makespan_ns, schedule.predicted_makespan_ns));
        return Ok(Answer { schedule, adjustment, compared_ns });
    }
    let adjusted = scheduler.adjusted(adjustment.clone())?;
    let schedule = adjusted.schedule_until(step, &samples, arm, halt)?;
    let compared_ns = if is_compared {
        let plain = scheduler.schedule_until(step, &samples, arm, halt)?;
        Some((adjusted.simulate(&plain)?.makespan_ns, adjusted.simulate(&schedule)?.makespan_ns))
    } else {
        None
    };
    Ok(Answer { schedule, adjustment, compared_ns })
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.shared.is_cancelled.store(true, Ordering::Relaxed);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, `take_within` has reported it. A drop cannot report anything.
            let _ = thread.join();
        }
    }
}
