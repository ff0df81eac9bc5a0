package faults

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

const (
	simulator  = "../nvmlsim"
	driverName = "gpu.nvidia.com"
	pool       = "node-1"
	gpu0       = "gpu-0000-1b-00-0"
	gpu1       = "gpu-0000-1c-00-0"

	// The test binary plays the plugin's processes: role says which, root on which stand.
	role = "FAULTS_TEST_CHILD"
	root = "FAULTS_TEST_ROOT"
)

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(role) {
	case "":
		m.Run()
	case "partition":
		err = nvidia.ServePartitions(context.Background(), os.Stdin, os.Stdout)
	case "scan":
		err = nvidia.ServeScan(context.Background(), os.Stdin, os.Stdout)
	default:
		err = play(os.Getenv(role))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// stand is a simulated node with two H100s, of which the second is half an admin's.
type stand struct{ root string }

func newStand(t *testing.T) stand {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	if out, err := exec.CommandContext(t.Context(), "make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	library, err := filepath.Abs("../../build/nvmlsim/libnvidia-ml.so.1")
	if err != nil {
		t.Fatal(err)
	}
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	s := stand{t.TempDir()}
	node := filepath.Join(s.root, "node.yaml")
	text := "driverVersion: \"580.65.06\"\ncudaVersion: \"13.0\"\ngpus:\n" +
		"- {model: h100-sxm5-80gb, pci: \"0000:1b:00.0\", pciRoot: \"pci0000:15\"}\n" +
		"- {model: h100-sxm5-80gb, pci: \"0000:1c:00.0\", pciRoot: \"pci0000:15\"}\n"
	if err := os.WriteFile(node, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	described, err := model.ReadNode(node, "faults")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"machine/dev", "cdi"} {
		if err := os.MkdirAll(filepath.Join(s.root, dir), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := layout.Up(layout.Options{
		Root: s.root, Models: models, Seed: "faults", Sources: layout.Sources{Library: library},
		Config: layout.Config{Kind: layout.Container, Node: described, Dev: filepath.Join(s.root, "machine", "dev")},
	}); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s stand) paths() nvidia.Paths {
	return nvidia.Paths{
		DriverRoot: filepath.Join(s.root, "driver"), HostDriverRoot: "/run/nvidia/driver",
		Sysfs: filepath.Join(s.root, "sys"), Proc: filepath.Join(s.root, "proc"),
	}
}

// change edits the simulated driver's state.
func (s stand) change(edit func(*state.File) error) error {
	f, err := state.Open(layout.StatePath(s.root))
	if err != nil {
		return err
	}
	return errors.Join(edit(f), f.Close())
}

// command is how the test binary is started in a role.
func (s stand) command(as string) []string {
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	return []string{"env", "NVMLSIM_DEV=" + filepath.Join(s.root, "driver", "dev"), root + "=" + s.root, role + "=" + as, self}
}

// plugin is what a process of the plugin has.
type plugin struct {
	*prepare.Preparer
	stand    stand
	cuts     *nvidia.Partitions
	specs    *cdi.Store
	snapshot inventory.Snapshot
}

func (p *plugin) Snapshot() inventory.Snapshot { return p.snapshot }

// plugin starts one: it looks at the node, and puts it in order.
func (s stand) plugin(ctx context.Context) (*plugin, error) {
	p, err := s.unrecovered(ctx)
	if err != nil {
		return nil, err
	}
	if err := p.Recover(ctx); err != nil {
		return nil, err
	}
	return p, p.Reconcile(ctx)
}

func (s stand) unrecovered(ctx context.Context) (*plugin, error) {
	records, err := checkpoint.Open(filepath.Join(s.root, "state"), durable.OS{})
	if err != nil {
		return nil, err
	}
	locks, err := lock.NewSet(filepath.Join(s.root, "state", "locks"))
	if err != nil {
		return nil, err
	}
	p := &plugin{stand: s, specs: cdi.NewStore(filepath.Join(s.root, "cdi")), cuts: nvidia.NewPartitions(s.paths(), s.command("partition")...)}
	p.Preparer = prepare.New(prepare.Options{
		DriverName: driverName, Pool: pool, BootID: "boot", Now: time.Now,
		Hardware: p, Specs: p.specs, Records: records, Locks: locks,
		Partitions: p.cuts, MIGEdits: s.paths().CapabilityEdits,
		Verify: func(edits specs.ContainerEdits) error {
			edits.Hooks = nil // nobody has installed the hook here
			return cdi.Verify(edits, s.paths().Visible)
		},
	})
	return p, p.scan(ctx)
}

func (p *plugin) scan(ctx context.Context) error {
	node, err := nvidia.Isolated(p.stand.paths(), p.stand.command("scan")...)(ctx)
	if err == nil && len(node.GPUs) != 2 {
		err = fmt.Errorf("%d GPUs were found: %v", len(node.GPUs), node.Problems)
	}
	p.snapshot = inventory.Snapshot{Ready: true, Known: true, Node: node}
	return err
}

func (p *plugin) card(gpu string) device.Card {
	for _, g := range p.snapshot.Node.GPUs {
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

var (
	parts = claimOf("parts", gpu0+"-mig-19-0", gpu0+"-mig-9-4", gpu1+"-mig-19-6")
	whole = claimOf("whole", gpu0)
)

func claimOf(name string, devices ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for i, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: fmt.Sprintf("r%d", i), Driver: driverName, Pool: pool, Device: d,
		})
	}
	return c
}

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
func play(o string) error {
	ctx := context.Background()
	p, err := stand{os.Getenv(root)}.unrecovered(ctx)
	if err != nil {
		return err
	}
	defer p.cuts.Close()
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
	specified, err := p.specs.Claims()
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
