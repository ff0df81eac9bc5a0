package schedules

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
)

// world is the simulated environment of the plugin: a node, the CDI directory, the claims in the
// API server, and the plugin's processes.
type world struct {
	*node

	specs    cdiDir
	lockFile string
	blocked  *blockedCalls
	claims   []*claim

	living    []*process
	processes int
	// clockOffset is how far the wall clock is wrong.
	clockOffset time.Duration
	// slowFor is how long a call with the fault "slow" takes.
	slowFor time.Duration
	// noFaults lets every call of the plugin continue at once and without a fault.
	noFaults bool
	// endsFull means that the claims are unprepared at the end while the disk is full: the kubelet
	// keeps the volumes that fill it until their Pod's claims are unprepared.
	endsFull bool
	// stateUnreadable is set when a file of the plugin's state was unreadable. The plugin may then no
	// longer know its MIG instances and the settings to restore.
	stateUnreadable bool
	// shared has the keys of the holder files that damaged records of this boot name, by their paths.
	shared map[string][]string
	// nameSurvives reports whether file names in directory dir that were not synced survive a power
	// cut.
	nameSurvives func(dir string) bool
	// adminRestores reports whether an admin's service restores a GPU's MIG instances at boot.
	adminRestores func(*gpu) bool
	dead          []*process
	violations    []string
	trace         []entry
}

// entry is a line of the trace, the list of a run's events.
type entry struct {
	process int
	what    string
	point   faultPoint
	fault   fault
}

func (e entry) String() string {
	switch {
	case e.process == 0:
		return e.what
	case e.point == "":
		return fmt.Sprintf("plugin %d: %s", e.process, e.what)
	case e.fault == none:
		return fmt.Sprintf("plugin %d:   %s", e.process, e.point)
	}
	return fmt.Sprintf("plugin %d:   %s: %s", e.process, e.point, e.fault)
}

func (w *world) note(format string, args ...any) {
	w.trace = append(w.trace, entry{what: fmt.Sprintf(format, args...)})
}

// violates adds a violated invariant to the run's result and to the trace.
func (w *world) violates(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if !slices.Contains(w.violations, text) {
		w.violations = append(w.violations, text)
	}
	w.note("VIOLATED: %s", text)
}

// newWorld returns a simulated node with cards GPUs. dir holds the real CDI directory and the
// locks.
func newWorld(dir string, cards int) (*world, error) {
	w := &world{
		node: newNode(cards), specs: realSpecs{filepath.Join(dir, "cdi"), filepath.Join(dir, "metadata")},
		lockFile: filepath.Join(dir, "claims.lock"), blocked: newBlockedCalls(), shared: map[string][]string{},
	}
	return w, w.specs.clear()
}

// kill ends a process of the plugin like kill -9.
func (w *world) kill(p *process) {
	if p.dead.Swap(true) {
		return
	}
	w.note("plugin %d is killed", p.id)
	w.living = slices.DeleteFunc(w.living, func(l *process) bool { return l == p })
	w.dead = append(w.dead, p)
	p.end()
	w.blocked.dismiss(p)
}

// dyingCalls counts the calls of killed processes that have not returned yet.
func (w *world) dyingCalls() int {
	n := 0
	for _, p := range w.dead {
		n += p.running
	}
	return n
}

// holdsLock reports whether any part of the lock file is locked.
func (w *world) holdsLock() (bool, error) {
	f, err := os.Open(w.lockFile)
	if err != nil {
		return false, err
	}
	all := unix.Flock_t{Type: unix.F_WRLCK} // ask for a lock of the whole file
	err = errors.Join(unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &all), f.Close())
	return all.Type != unix.F_UNLCK, err
}

// powerCut kills all processes of the plugin, loses unsynced data, and reboots the node.
func (w *world) powerCut() {
	for _, p := range slices.Clone(w.living) {
		w.kill(p)
	}
	w.note("power cut and reboot")
	clear(w.shared)
	w.disk.PowerCutKeeping(w.nameSurvives)
	if err := w.specs.clear(); err != nil {
		w.violates("clear the CDI directory: %v", err)
	}
	w.reboot(w.adminRestores)
	for _, c := range w.claims {
		c.rebooted()
	}
}

// checkRemoval adds a violation if an admin had created the MIG instance that the plugin just
// destroyed.
func (w *world) checkRemoval(g *gpu, id uint32) {
	if g.isAdmins(id) {
		w.violates("the plugin removed MIG instance %d of %s, which an admin created", id, g.name())
	}
}

// markUnreadable notes that a file of the plugin's state cannot be read. If it is a claim's
// checkpoint record, the claim's devices are unknown and the plugin removes the claim's CDI spec.
// So the invariants of prepared claims no longer apply to that claim.
func (w *world) markUnreadable(path string) {
	w.note("state file %s cannot be read", path)
	w.stateUnreadable = true
	for _, c := range w.claims {
		if c.phase == prepared && c.isAbout(path) {
			c.phase = forgotten
		}
	}
}

// apiClaim returns the claim with that name from the API server, or nil.
func (w *world) apiClaim(name string) *resourceapi.ResourceClaim {
	for _, c := range w.claims {
		if c.name == name && c.now != nil {
			return c.now.DeepCopy()
		}
	}
	return nil
}

// traceText returns the last lines of the trace, at most last.
func (w *world) traceText(last int) string {
	lines := make([]string, 0, last)
	for _, e := range w.trace[max(0, len(w.trace)-last):] {
		lines = append(lines, e.String())
	}
	return strings.Join(lines, "\n")
}

// dice makes every random choice of a schedule.
type dice struct{ *rand.Rand }

func newDice(seed uint64) dice { return dice{rand.New(rand.NewPCG(seed, 1))} } //nolint:gosec // reproducible, and no secret

func (d dice) chance(percent float64) bool { return d.Float64()*100 < percent }

func pick[T any](d dice, from []T) T { return from[d.IntN(len(from))] }
