package faults

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/host"
)

const (
	gpu0 = "gpu-0000-1b-00-0"
	gpu1 = "gpu-0000-1c-00-0"
)

// atOnce is how many tests run at once: they wait more than they work.
const atOnce = "12"

func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("test.parallel", atOnce)
	os.Exit(host.Main(m, play))
}

// stand is a simulated node with two H100s, of which the second is half an admin's, and the API server that it belongs to.
type stand struct {
	host.Host
	api    host.API
	theirs []device.Instance
}

func newStand(t *testing.T) *stand {
	t.Helper()
	s := &stand{Host: host.New(t, "0000:1b:00.0", "0000:1c:00.0"), api: host.NewAPI()}
	s.halfAnAdmins(t)
	return s
}

// plugin is what a process of the plugin has.
type plugin struct{ *host.Plugin }

// unrecovered has put nothing in order yet.
func (s *stand) unrecovered(ctx context.Context) (*plugin, error) {
	p, err := s.Plugin(ctx, durable.OS{}, func(context.Context, string, string) (*resourceapi.ResourceClaim, error) {
		return nil, errors.New("no claim waits for another")
	})
	return &plugin{p}, err
}

func (p *plugin) card(gpu string) device.Card {
	for _, g := range p.Snapshot().Node.GPUs {
		if g.WholeName() == gpu {
			return g.Card()
		}
	}
	return device.Card{}
}

// operation is what a plugin is doing when something goes wrong.
type operation string

const (
	prepareParts   operation = "prepare partitions"
	unprepareParts operation = "unprepare partitions"
	prepareWhole   operation = "prepare the whole of what was cut"
)

var operations = []operation{prepareParts, unprepareParts, prepareWhole}

var (
	parts = host.Claim("parts", gpu0+"-mig-19-0", gpu0+"-mig-9-4", gpu1+"-mig-19-6")
	whole = host.Claim("whole", gpu0)
)

func (p *plugin) do(ctx context.Context, o operation) (err error) {
	switch o {
	case prepareParts:
		_, err = p.Prepare(ctx, parts)
	case unprepareParts:
		err = p.Unprepare(ctx, parts.UID)
	case prepareWhole:
		_, err = p.Prepare(ctx, whole)
	}
	return err
}

// play is the plugin as a process of its own.
func play(ctx context.Context, h host.Host, o string) error {
	p, err := (&stand{Host: h}).unrecovered(ctx)
	if err != nil {
		return err
	}
	defer p.Cuts.Close()
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil { // the fault is there now
		return err
	}
	return p.do(ctx, operation(o))
}

// agree compares hardware, records and specs.
func (p *plugin) agree(ctx context.Context, theirs []device.Instance) error {
	var errs []error
	complain := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	specified, err := p.Specs.Claims()
	if err != nil {
		return err
	}
	entries, err := p.Records.List()
	if err != nil {
		return err
	}
	held := 0
	for _, e := range entries {
		r, _, err := p.Records.Load(e.ClaimUID)
		if err != nil || r.State != checkpoint.Prepared {
			complain("the record of %s says %s: %w", e.ClaimUID, r.State, err)
		}
		if !slices.Contains(specified, e.ClaimUID) {
			complain("%s has no spec", e.ClaimUID)
		}
		for _, d := range r.Devices {
			if strings.Contains(d.Device, "-mig-") {
				held++
			}
		}
	}
	if len(specified) != len(entries) {
		complain("there are specs of %v, and %d records", specified, len(entries))
	}
	for _, gpu := range []string{gpu0, gpu1} {
		there, foreign, err := p.Foreign(ctx, p.card(gpu), gpu)
		if err != nil {
			return err
		}
		held -= len(there) - len(foreign)
		want := theirs
		if gpu == gpu0 {
			want = nil
		}
		if !slices.EqualFunc(foreign, want, func(a, b device.Instance) bool {
			return a.ID == b.ID && a.Placement == b.Placement && len(a.Compute) == 1 && a.Compute[0].UUID == b.Compute[0].UUID
		}) {
			complain("on %s nobody knows %+v; someone else's are %+v", gpu, foreign, want)
		}
	}
	if held != 0 {
		complain("claims hold %d partitions more than there are", held)
	}
	return errors.Join(errs...)
}
