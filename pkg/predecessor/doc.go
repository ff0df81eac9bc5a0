// Package predecessor reads what NVIDIA's reference driver (kubernetes-sigs/dra-driver-nvidia-gpu) has left on a node that this driver takes over: its
// checkpoint.json, in the plugin directory that both share because they have the same name.
//
// The file lists the claims that were prepared and not given back. Their Pods may still run, and the scheduler knows their devices by names that are not ours:
// what they hold must not be given to others until they end. The package says which claims those are, and what each of them holds, as far as the file proves
// it. It never changes the file's content: which of its claims have ended is noted beside this driver's own records, and when all have, the file is renamed, so
// that whoever starts next, this driver or that one, does not believe it any more.
//
// A file that cannot be read, or that a later version has written, may list anything: that is an [UnreadableError], and the caller withholds everything.
package predecessor
