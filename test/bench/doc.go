// Package bench measures what it costs that many claims want partitions at once, and holds that to limits.
//
// The command cmd/bench measures the production program as a whole; this package looks at the transaction alone, where more can be asked of it.
//
// It runs the transaction with all that it stands on, the real records, locks, specs and workers, on the simulated driver, whose calls take as long as on
// hardware. Every limit is a ratio of two durations of the same run, so that a slow machine does not fail it; one that is busy with other things
// may.
package bench
