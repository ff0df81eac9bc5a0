package bind

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/persistenced"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

// unwatchLimit is how long a release waits until the health watch leaves the card out. Without
// that, the watch has a gap when the card returns. A new watcher may need seconds for each card.
const unwatchLimit = 20 * time.Second

// Options configure a [Binder].
type Options struct {
	Paths nvidia.Paths
	// Dev is where the plugin sees the host's /dev. Empty means the same path.
	Dev string
	// Command starts the child process, which must call [Serve] on its standard input and output.
	Command []string
	Cards   Cards
}

// Cards are the GPUs that NVIDIA's driver has. Package cut implements it.
type Cards interface {
	// Leave makes the plugin's processes close the card. They leave it closed until back is called.
	Leave(ctx context.Context, card device.PCIAddress) (back func(), err error)
	// Persistence reads the card's persistence mode, which the kernel's driver keeps for as long as it
	// has the card.
	Persistence(ctx context.Context, card device.Card) (bool, error)
	SetPersistence(ctx context.Context, card device.Card, on bool) error
}

// Binder binds cards to VFIO and releases them. Calls for one card run one after another.
type Binder struct {
	options Options
	slots   sync.Map // of *slot, by PCI address
}

// slot has the last child process of one card. Between its send to busy and its receive from it, a
// goroutine may use the other fields.
type slot struct {
	busy    chan struct{}
	process *child.Process[answer]
	last    order
	// nodes are the device nodes through which processes could use the card when process was started.
	nodes host.DeviceNodes
}

// New returns a Binder.
func New(o Options) *Binder {
	o.Paths = o.Paths.WithDefaults()
	o.Dev = cmp.Or(o.Dev, "/dev")
	return &Binder{options: o}
}

// Look reads how the card and its companions are bound, and plans to which drivers they are to be
// bound. It returns an error if the card cannot be passed through.
func (b *Binder) Look(ctx context.Context, card device.Card) (f vfio.Found, err error) {
	a, err := b.call(ctx, b.order(opLook, card, nil))
	if err != nil {
		return f, err
	}
	f.Functions = a.List
	if host.Driver(b.options.Paths.Sysfs, card.PCIAddress) != host.NVIDIADriver {
		return f, nil
	}
	if f.Persistence, err = b.persistenced().Keeps(ctx, card.PCIAddress); err != nil || f.Persistence {
		return f, err
	}
	f.Persistence, err = b.options.Cards.Persistence(ctx, card)
	return f, err
}

// Bind binds the card and its companions to VFIO, as f says. It does nothing if they are bound. The
// error has [device.FailureInUse] and names the processes if some use the card.
func (b *Binder) Bind(ctx context.Context, card device.Card, f vfio.Found) error {
	if b.isBound(f) {
		return nil
	}
	if host.Driver(b.options.Paths.Sysfs, card.PCIAddress) == host.NVIDIADriver {
		if err := b.persistenced().Close(ctx, card.PCIAddress); err != nil {
			return err
		}
		if f.Persistence {
			if err := b.options.Cards.SetPersistence(ctx, card, false); err != nil {
				return err
			}
		}
		back, err := b.options.Cards.Leave(ctx, card.PCIAddress)
		if err != nil {
			return err
		}
		defer back()
	}
	_, err := b.call(ctx, b.order(opBind, card, f.Functions))
	return err
}

func (b *Binder) persistenced() persistenced.Daemon {
	return persistenced.In(b.options.Paths.DriverRoot)
}

func (b *Binder) isBound(f vfio.Found) bool {
	return !slices.ContainsFunc(f.Functions, func(one vfio.Binding) bool {
		return host.Driver(b.options.Paths.Sysfs, one.Address) != one.VFIO
	})
}

// Release takes the card and its companions from VFIO, as [vfio.Release] says. The error has
// [device.FailureInUse] and names the processes if some still use the card through VFIO.
func (b *Binder) Release(ctx context.Context, card device.Card, f vfio.Found) error {
	if host.Driver(b.options.Paths.Sysfs, card.PCIAddress) != host.NVIDIADriver {
		limit := unwatchLimit
		if deadline, ok := ctx.Deadline(); ok {
			limit = min(limit, time.Until(deadline)/2) // the release itself needs time, too
		}
		waiting, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		if back, err := b.options.Cards.Leave(waiting, card.PCIAddress); err == nil {
			defer back()
		}
	}
	if _, err := b.call(ctx, b.order(opRelease, card, f.Functions)); err != nil {
		return err
	}
	if f.Persistence {
		// nvidia-persistenced cannot open a card that came back (dra-driver-nvidia-gpu#1037).
		if err := b.options.Cards.SetPersistence(ctx, card, true); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to switch persistence mode on again", "gpu", card.String())
		}
	}
	return nil
}

// Access waits for the device nodes of a bound card.
func (b *Binder) Access(ctx context.Context, card device.PCIAddress, preferIOMMUFD bool) (vfio.Access, error) {
	return vfio.AwaitAccess(ctx, b.options.Paths.Sysfs, b.options.Dev, card, preferIOMMUFD)
}

func (b *Binder) order(op operation, card device.Card, list []vfio.Binding) order {
	return order{Paths: b.options.Paths, Dev: b.options.Dev, Op: op, Card: card.PCIAddress, List: list}
}

func (b *Binder) slot(card device.PCIAddress) *slot {
	s, _ := b.slots.LoadOrStore(card, &slot{busy: make(chan struct{}, 1)})
	return s.(*slot)
}

// call carries out the order in a child process. If the card's last process still hangs, it returns
// an error soon instead.
func (b *Binder) call(ctx context.Context, o order) (answer, error) {
	if ctx.Err() != nil {
		return answer{}, o.fail(device.FailureTimeout, "no time was left; nothing was done")
	}
	s := b.slot(o.Card)
	select {
	case s.busy <- struct{}{}:
	case <-ctx.Done():
		return answer{}, o.fail(device.FailureTimeout, "an earlier call is still running; nothing was done")
	}
	defer func() { <-s.busy }()
	if err := s.awaitGone(ctx, o); err != nil {
		return answer{}, err
	}
	nodes, err := o.awaitNodes(ctx) // read now, because a card of which a driver lets go shows no nodes
	if err != nil {
		return answer{}, err
	}
	process, err := child.Start[answer](child.Command{Args: b.options.Command}, o)
	if err != nil {
		return answer{}, o.fail(device.FailureOther, fmt.Sprintf("start the process: %v", err))
	}
	s.process, s.last, s.nodes = process, o, nodes
	defer process.Kill()
	select {
	case a := <-process.Messages:
		if a.Error != nil {
			return answer{}, a.Error
		}
		return a, nil
	case <-process.Ended:
		return answer{}, o.fail(device.FailureDied, fmt.Sprintf("its process died (%v)%s", process.Failure(), process.Stderr()))
	case <-ctx.Done():
		return answer{}, s.hangs(o, context.Cause(ctx).Error())
	}
}

// awaitGone waits a moment until the card's last process has ended.
func (s *slot) awaitGone(ctx context.Context, o order) error {
	if s.process == nil {
		return nil
	}
	select {
	case <-s.process.Gone:
		return nil
	case <-time.After(child.KillLimit):
	case <-ctx.Done():
	}
	return s.hangs(o, "nothing was done")
}

// hangs returns the error of the order o while the card's last process does not end.
func (s *slot) hangs(o order, what string) error {
	message := fmt.Sprintf("%s: the kernel has not answered the attempt to %s (process %d), and will when no process uses the GPU",
		what, s.last.phrase(), s.process.PID)
	return o.fail(device.FailureTimeout, message, host.UsersForError(o.Paths, s.nodes)...)
}
