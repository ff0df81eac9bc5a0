// Package bench limits the time that many simultaneous claims for partitions take.
//
// It measures only the code for Prepare and Unprepare, in more situations than the command
// cmd/bench, which measures the production program as a whole.
//
// Checkpoint records, locks, CDI specs and worker processes are real. The simulated driver's calls
// take as long as on hardware. Every limit is a ratio of two durations of the same run, so a slow
// machine does not fail the test. A busy machine may.
package bench
