//! What a world of several ranks holds: the line of its collectives, the thread of its reductions, its control plane.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::collective::line::Line;
use crate::collective::link::Costs;
use crate::control::Control;
use crate::error::CommError;
use crate::join::Joined;
use crate::reduction::Cost;

type Job = Box<dyn FnOnce() + Send>;

/// The inside of a world of several ranks.
pub(crate) struct Ranks {
    worker: Option<(Sender<Job>, JoinHandle<()>)>,
    pub line: Arc<Line>,
    pub control: Arc<Control>,
    pub costs: Arc<Costs>,
    pub backend: &'static str,
}

impl Ranks {
    pub(crate) fn new(joined: Joined) -> Result<Ranks, CommError> {
        let Joined { control, link, costs, .. } = joined;
        let backend = link.carrier.name();
        let (jobs, queue) = channel::<Job>();
        let thread = std::thread::Builder::new()
            .name(format!("tercio-reduce-{}", link.rank))
            .spawn(move || queue.into_iter().for_each(|job| job()))
            .map_err(|source| CommError::Io { what: "starting the thread of reductions".into(), source })?;
        Ok(Ranks { worker: Some((jobs, thread)), line: Arc::new(Line::new(link)), control, costs, backend })
    }

    /// Runs a job in the thread of reductions, after those before it.
    pub(crate) fn send(&self, job: Job) {
        if let Some((jobs, _)) = &self.worker {
            // A thread that is gone drops the job, and whoever waits for its answer sees that.
            let _ = jobs.send(job);
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if let Some((jobs, thread)) = self.worker.take() {
            drop(jobs);
            let _ = thread.join();
        }
        self.line.close();
        // Now the line goes and with it the carrier, then the control plane with a goodbye: fields go in their order.
    }
}

impl Costs {
    /// So far.
    pub(crate) fn read(&self) -> Cost {
        let seconds = |ns: u64| Duration::from_nanos(ns).as_secs_f64();
        Cost {
            waited: seconds(self.waited_ns.load(Ordering::Relaxed)),
            busy: seconds(self.busy_ns.load(Ordering::Relaxed)),
            sent: self.sent.load(Ordering::Relaxed),
        }
    }
    /// The caller waited.
    pub(crate) fn wait(&self, time: Duration) {
        self.waited_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }
}
