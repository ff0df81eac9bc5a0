// Package prepare is the transaction that makes a claim's devices usable, and takes them back.
//
// A preparation is a list of steps, each with an idempotent Apply and an idempotent Revert. The list is in the claim's record, on the disk, before the
// first step runs; the record says "Prepared" when the last one has. Unprepare reverts the steps of the record backwards and removes it. Recovery
// after a crash is the same: an unfinished record is reverted. There is no other path.
//
// What it promises: an answer without an error stands on things that were looked at in that call (device nodes, mount sources, specs, record, partitions); a
// repeated Prepare looks again and mends; what one claim holds is refused to every other, by name, after a
// short wait for it; a claim that comes with another allocation gives the old one back first; Unprepare needs no GPU driver where nothing was cut. Calls for one claim follow each other, calls for different GPUs run side by side, and
// nothing is kept in memory between calls, so that two instances of the plugin cannot disagree.
//
// # Partitions
//
// A partition is cut when its claim is prepared and removed when it is given back. Both go through [Partitions], call by call, and the record knows before
// each call what is about to happen, and after it what came of it. What no record proves to be ours is someone else's: it is used as it is by claims that
// were allocated it, and never changed. The proof is the GPU instance's ID, its place and the MIG device's UUID, in the boot in which it was made; of an
// instance whose making was cut short, that it is exactly at the place, was not there before, and is still empty.
//
// Which partitions are offered is a policy's to say, and none of this package's business: what a
// claim was allocated is made, kept and made again, whatever the policy says by then.
//
// The hardware forgets at a reboot, a reload of its driver and a reset. A partition that is gone is cut again at its place, by the next Prepare or by
// [Preparer.Reconcile]; where that cannot be, the claim's spec is removed: its containers fail to start, and never get another device.
//
// # Sharing
//
// Time slices, compute mode, MPS daemons and the partitions of which there are shares can be held by several claims at once. Such a step has a file of its
// own (package checkpoint's Holder), with what was found before it: the first claim applies it, others join if they want the same value and are refused by
// the holders' names if not, and the last sets back what was found. The file has all that this takes, so a claim whose record cannot be read leaves by it.
// While claims hold a step, every repeated Prepare and every [Preparer.Reconcile] looks whether it holds still, and sets it again: the driver forgets at a
// reload, at a reset, and, without persistence mode, whenever the last process closes the GPU. Where the file itself cannot be read nobody joins, and the last
// claim whose record names it sets the hardware to its default. A comparison does so where no record names it, ends daemons that nobody holds, and looks once
// at what many claims share. That a time slice cannot be set back keeps no claim: its file stays without one, and comparisons try again.
//
// A fraction's limits are in its containers' environment, and hold for each process; nothing here holds a container as a whole to them.
//
// # Whole GPUs
//
// A Prepare of whole GPUs asks no hardware: it uses what the inventory knows already. Only a GPU whose MIG mode may be on, as the inventory or a mark of
// ours on the disk says, is looked at, and made whole. Without a wish to share it pays for none of the above: no look, no file.
package prepare
