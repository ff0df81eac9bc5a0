package bind

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/child"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
)

// Command is the plugin's internal subcommand that runs [Serve].
const Command = "bind"

const (
	// idleLimit is how long a bind waits until processes close the card. Scans of this plugin open it
	// for seconds.
	idleLimit = 5 * time.Second
	idlePoll  = 100 * time.Millisecond
	// listLimit is how long NVIDIA's driver may take to list a card that it has.
	listLimit = 10 * time.Second
)

// order tells the child process what to do with one card.
type order struct {
	Paths nvidia.Paths      `json:"paths"`
	Dev   string            `json:"dev"`
	Op    operation         `json:"op"`
	Card  device.PCIAddress `json:"card"`
	List  []vfio.Binding    `json:"list,omitempty"`
}

type operation string

const (
	opLook    operation = "look"
	opBind    operation = "bind"
	opRelease operation = "release"
)

// phrase describes the order for messages.
func (o order) phrase() string {
	what := map[operation]string{opLook: "read the PCI functions of", opBind: "bind to VFIO", opRelease: "release from VFIO"}[o.Op]
	return what + " " + o.Card.WholeName()
}

// fail returns an error of the order. users are the processes that have the card open, if the order
// failed because of them.
func (o order) fail(code device.FailureCode, message string, users ...nvidia.Process) *nvidia.Error {
	if slices.ContainsFunc(users, func(p nvidia.Process) bool { return !p.Plugin }) {
		message += ": end the processes"
	} else if len(users) > 0 {
		message += ": only this plugin has it open, for a scan or until its update ends: the kubelet retries"
	}
	return &nvidia.Error{Op: o.phrase(), Code: code, Message: message, Processes: users}
}

// answer is the only message of the child process.
type answer struct {
	List  []vfio.Binding `json:"list,omitempty"`
	Error *nvidia.Error  `json:"error,omitempty"`
}

// Serve runs in the child process of [Binder]. It reads an order from in, carries it out and writes
// the answer to out. It begins no further write when in is closed.
func Serve(ctx context.Context, in io.Reader, out io.Writer) error {
	o, ctx, end, err := child.Order[order](ctx, in)
	if err != nil {
		return fmt.Errorf("read which card to bind: %w", err)
	}
	defer end()
	a, err := o.do(ctx)
	if err != nil {
		code, used := device.FailureOther, new(usedError)
		if errors.As(err, &used) {
			code = device.FailureInUse
		}
		a = answer{Error: o.fail(code, err.Error(), used.users...)}
	}
	return json.NewEncoder(out).Encode(a)
}

func (o order) do(ctx context.Context) (answer, error) {
	lock, err := host.LockCard(o.Paths, o.Card)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = lock.Close() }() // nothing was written
	switch o.Op {
	case opLook:
		return o.look()
	case opBind:
		if err := o.awaitIdle(ctx); err != nil {
			return answer{}, err
		}
		if _, err := o.group(); err != nil { // it may have changed since the look
			return answer{}, err
		}
		return answer{}, vfio.Bind(ctx, vfio.Sysfs(o.Paths.Sysfs), o.List, o.checkIdle)
	case opRelease:
		return answer{}, vfio.Release(ctx, vfio.Sysfs(o.Paths.Sysfs), o.List, o.checkIdle)
	default:
		return answer{}, fmt.Errorf("this version does not know operation %q", o.Op)
	}
}

// group reads the card's group. It returns an error if the card cannot be passed through.
func (o order) group() (vfio.Group, error) {
	group, err := vfio.Read(o.Paths.Sysfs, o.Card)
	if refusal := group.Refusal(); err == nil && refusal != "" {
		err = errors.New(refusal)
	}
	return group, err
}

func (o order) look() (answer, error) {
	group, err := o.group()
	if err != nil {
		return answer{}, err
	}
	list, err := group.Bindings(o.Paths.Sysfs, o.Paths.Modules)
	return answer{List: list}, err
}

// usedError says that processes use the card.
type usedError struct{ users []nvidia.Process }

func (*usedError) Error() string { return "processes use the GPU" }

// checkIdle returns an error if a process has the card open. The drivers of its companions need no
// check, because they take a function from its users.
func (o order) checkIdle(b vfio.Binding) error {
	if b.Address != o.Card {
		return nil
	}
	nodes, err := o.nodes()
	if err != nil {
		return err
	}
	if users := host.UsersOf(o.Paths, nodes); len(users) > 0 {
		return &usedError{users}
	}
	return nil
}

// awaitIdle waits until no process has a card of NVIDIA's driver open, at most idleLimit.
func (o order) awaitIdle(ctx context.Context) (err error) {
	_ = wait.PollUntilContextTimeout(ctx, idlePoll, idleLimit, true, func(context.Context) (bool, error) {
		err = nil
		if host.Driver(o.Paths.Sysfs, o.Card) == host.NVIDIADriver {
			err = o.checkIdle(vfio.Binding{Address: o.Card})
		}
		return err == nil, nil
	})
	return err // of the last attempt
}

// nodes returns the device nodes through which processes use the card now: that of NVIDIA's driver,
// or those of VFIO.
func (o order) nodes() (host.DeviceNodes, error) {
	if host.Driver(o.Paths.Sysfs, o.Card) != host.NVIDIADriver {
		return host.VFIONodes(vfio.NodesOf(o.Paths.Sysfs, o.Dev, o.Card)...), nil
	}
	minor, err := host.Minor(o.Paths, o.Card)
	return host.GPUNodes(o.Paths, o.Card, minor), err
}

// awaitNodes waits until nodes knows the device nodes. The kernel links a driver to a card before
// the driver has taken it, and only then does NVIDIA's driver list the card (drivers/base/dd.c,
// really_probe).
func (o order) awaitNodes(ctx context.Context) (nodes host.DeviceNodes, err error) {
	_ = wait.PollUntilContextTimeout(ctx, idlePoll, listLimit, true, func(context.Context) (bool, error) {
		nodes, err = o.nodes()
		return err == nil, nil
	})
	return nodes, err
}
