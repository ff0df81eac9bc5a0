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

// world is a node, its plugin, and what lies around them.
type world struct {
	*node

	specs   cdiDir
	lockDir string
	points  *points
	claims  []*claim

	living    []*process
	processes int
	// clock is by how much the wall clock is off.
	clock time.Duration
	// pause is how long what is slow takes.
	pause time.Duration
	// calm lets every call go on at once, and nothing go wrong.
	calm bool
	// blind says that a file of the plugin's state could not be read: what it said of cuts and settings may be lost.
	blind bool
	// written says whether a directory's names have found their way to the disk unasked when the power goes.
	written func(dir string) bool
	// restored says whether an admin's service cuts a card again as it was when the node starts.
	restored func(*gpu) bool
	dead     []*process
	broken   []string
	trace    []entry
}

// entry is a line of what happened.
type entry struct {
	process int
	what    string
	step    step
	fault   fault
}

func (e entry) String() string {
	switch {
	case e.process == 0:
		return e.what
	case e.step == "":
		return fmt.Sprintf("plugin %d: %s", e.process, e.what)
	case e.fault == none:
		return fmt.Sprintf("plugin %d:   %s", e.process, e.step)
	}
	return fmt.Sprintf("plugin %d:   %s: %s", e.process, e.step, e.fault)
}

func (w *world) note(format string, args ...any) {
	w.trace = append(w.trace, entry{what: fmt.Sprintf(format, args...)})
}

// breaks notes that something does not hold that must.
func (w *world) breaks(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if !slices.Contains(w.broken, text) {
		w.broken = append(w.broken, text)
	}
	w.note("BROKEN: %s", text)
}

// newWorld is a node in a directory of its own.
func newWorld(dir string, cards int) (*world, error) {
	w := &world{node: newNode(cards), specs: realSpecs{filepath.Join(dir, "cdi")}, lockDir: filepath.Join(dir, "locks"), points: newPoints()}
	return w, w.specs.clear()
}

// kill is kill -9.
func (w *world) kill(p *process) {
	if p.dead.Swap(true) {
		return
	}
	w.note("plugin %d is killed", p.id)
	w.living = slices.DeleteFunc(w.living, func(l *process) bool { return l == p })
	w.dead = append(w.dead, p)
	p.end()
	w.points.dismiss(p)
}

// dying is how many calls of dead processes have not noticed yet.
func (w *world) dying() int {
	n := 0
	for _, p := range w.dead {
		n += p.running
	}
	return n
}

// heldLocks are the files of which anybody holds a lock, of the whole or of a part.
func (w *world) heldLocks() ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(w.lockDir, "*"))
	var held []string
	for _, path := range paths {
		f, oerr := os.OpenFile(path, os.O_RDWR, 0)
		if oerr != nil {
			return nil, oerr
		}
		all := unix.Flock_t{Type: unix.F_WRLCK} // from the beginning to the end
		err = errors.Join(err, unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &all))
		if all.Type != unix.F_UNLCK || unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
			held = append(held, filepath.Base(path))
		}
		err = errors.Join(err, f.Close())
	}
	return held, err
}

// powerCut ends all processes, and starts the node again.
func (w *world) powerCut() {
	for _, p := range slices.Clone(w.living) {
		w.kill(p)
	}
	w.note("the power goes, and comes again")
	w.disk.PowerCutKeeping(w.written)
	if err := w.specs.clear(); err != nil {
		w.breaks("clear the CDI directory: %v", err)
	}
	w.reboot(w.restored)
	for _, c := range w.claims {
		c.rebooted()
	}
}

// removes is told of each instance that the plugin removes.
func (w *world) removes(g *gpu, id uint32) {
	if g.isTheirs(id) {
		w.breaks("instance %d of %s was removed, which an admin has cut", id, g.name())
	}
}

// isUnreadable is told of each file of the plugin's state that cannot be read. What a claim has whose record it is nobody can tell any more, and its spec is
// removed with what is set aside: for the kubelet it is prepared still, and here it is not held to that.
func (w *world) isUnreadable(path string) {
	w.note("%s cannot be read", path)
	w.blind = true
	for _, c := range w.claims {
		if c.phase == prepared && c.isAbout(path) {
			c.phase = forgotten
		}
	}
}

// inAPI is the claim as the API server has it.
func (w *world) inAPI(name string) *resourceapi.ResourceClaim {
	for _, c := range w.claims {
		if c.name == name && c.now != nil {
			return c.now.DeepCopy()
		}
	}
	return nil
}

// story is the end of what happened.
func (w *world) story(last int) string {
	lines := make([]string, 0, last)
	for _, e := range w.trace[max(0, len(w.trace)-last):] {
		lines = append(lines, e.String())
	}
	return strings.Join(lines, "\n")
}

// dice is what decides.
type dice struct{ *rand.Rand }

func newDice(seed uint64) dice { return dice{rand.New(rand.NewPCG(seed, 1))} } //nolint:gosec // a story to be told again, no secret

func (d dice) chance(percent float64) bool { return d.Float64()*100 < percent }

func pick[T any](d dice, from []T) T { return from[d.IntN(len(from))] }
