// Package prepare is the transaction that makes a claim's devices usable, and takes them back.
//
// A preparation is a list of steps, each with an idempotent Apply and an idempotent Revert. The list is in the claim's record, on the disk, before the
// first step runs; the record says "Prepared" when the last one has. Unprepare reverts the steps of the record backwards and removes it. Recovery
// after a crash is the same: an unfinished record is reverted. There is no other path.
//
// What it promises: an answer without an error stands on things that were looked at in that call (device nodes, mount sources, specs, record); a repeated
// Prepare looks again and mends; a GPU that one claim holds is refused to every other, by name; a claim that comes with another allocation gives the old
// one back first; Unprepare needs no GPU driver. Calls for one claim follow each other, calls for different GPUs run side by side, and nothing is kept
// in memory between calls, so that two instances of the plugin cannot disagree.
//
// A Prepare asks no hardware: it uses what the inventory knows already.
package prepare
