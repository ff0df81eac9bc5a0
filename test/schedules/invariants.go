package schedules

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/statefile"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/busmodel"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// The invariants are numbered as in the package documentation.

// disturbances returns how often each GPU lost its state so far and, as the last element, how often
// the MPS supervisor died. If two results are equal, no GPU and no MPS daemon was disturbed in
// between.
func (w *world) disturbances() []int {
	var all []int
	for _, g := range w.gpus {
		all = append(all, g.disturbed)
	}
	return append(all, w.supervisorDeaths)
}

// files opens the plugin's state directory on the simulated disk, without fault points.
func files(disk durable.FS) (*checkpoint.Store, error) { return checkpoint.Open(state, disk) }

// checkPrepared runs when Prepare has just succeeded. It adds a violation if the claim's checkpoint
// record would not survive a power cut, if another claim excludes its devices, or if a container
// would not get them.
func (w *world) checkPrepared(k *call) {
	after := w.disk.Clone()
	after.PowerCut()
	w.checkRecord(after, k.object)
	for _, other := range w.claims {
		if other == k.claim || other.phase != prepared {
			continue
		}
		if both := w.conflict(k.object, other.got); both != "" {
			w.violates("devices %s exclude each other, but claims %s and %s hold them", both, k.claim.name, other.name)
		}
	}
	w.checkMemory(k.claim, k.object)
	if slices.Equal(k.disturbed, w.disturbances()) {
		if err := w.usable(k.object); err != nil {
			w.violates("Prepare of claim %s succeeded, but its containers lack something: %v", k.claim.name, err)
		}
	}
}

// checkMemory adds a violation if claim c and the prepared claims together hold more memory of a
// device than the device has. The parameter of is the API object of c.
func (w *world) checkMemory(c *claim, of *resourceapi.ResourceClaim) {
	var held []*resourceapi.ResourceClaim
	for _, other := range w.claims {
		if other != c && other.phase == prepared {
			held = append(held, other.got)
		}
	}
	if much := w.overfull(of, held); much != "" {
		w.violates("prepared claims, among them %s, hold too much memory: %s", c.name, much)
	}
}

// checkRecord adds a violation unless the disk has a checkpoint record of the claim with the
// claim's devices.
func (w *world) checkRecord(disk *durabletest.Disk, c *resourceapi.ResourceClaim) {
	store, err := files(disk)
	if err != nil {
		w.violates("open the state: %v", err)
		return
	}
	r, found, err := store.Load(c.UID)
	if err != nil || !found || r.State != checkpoint.Prepared || !sameDevices(r, c) {
		w.violates("prepared claim %s: record found: %v, its state %q, its devices %v: %v", c.Name, found, r.State, r.Devices, err)
	}
}

func sameDevices(r checkpoint.Record, c *resourceapi.ResourceClaim) bool {
	return slices.EqualFunc(r.Devices, results(c), sameAs)
}

func sameAs(d checkpoint.Device, want result) bool {
	return d.Request == want.Request && d.Device == want.Device &&
		d.AdminAccess == ptr.Deref(want.AdminAccess, false) && ptr.Deref(d.ShareID, "") == ptr.Deref(want.ShareID, "")
}

// usable returns an error unless a container of claim c would get all devices that are allocated to
// c.
func (w *world) usable(c *resourceapi.ResourceClaim) error {
	if !w.specs.hasBase() && slices.ContainsFunc(results(c), func(r result) bool { return !isPassthrough(r.Device) }) {
		return errors.New("there is no base CDI spec")
	}
	spec, err := w.specs.of(c.UID)
	if err != nil || spec == nil {
		return fmt.Errorf("the claim has no CDI spec: %w", err)
	}
	var errs []error
	for _, r := range results(c) {
		errs = append(errs, w.deviceUsable(c, r, spec))
	}
	return errors.Join(errs...)
}

// deviceUsable returns an error unless a container of claim c would get the allocated device r.
// spec is the claim's CDI spec.
func (w *world) deviceUsable(c *resourceapi.ResourceClaim, r result, spec []specs.Device) error {
	i := slices.IndexFunc(spec, func(d specs.Device) bool { return d.Name == cdi.ClaimDeviceName(c.UID, r.Device, r.ShareID) })
	if i < 0 {
		return fmt.Errorf("device %s is not in the claim's CDI spec", r.Device)
	}
	name, ok := device.ParseName(r.Device)
	g := w.gpu(name.GPU)
	if !ok || g == nil {
		return fmt.Errorf("device %s does not exist", r.Device)
	}
	if name.Passthrough {
		return g.checkPassthrough(spec[i].ContainerEdits)
	}
	admin := ptr.Deref(r.AdminAccess, false)
	uuid, err := w.checkEdits(g, name, r.Device, admin, spec[i].ContainerEdits)
	if err != nil {
		return err
	}
	if described := w.specs.described(c.UID)[r.Device]; described != uuid {
		return fmt.Errorf("device %s is %s, and the claim's metadata says %q", r.Device, uuid, described)
	}
	if admin {
		return nil
	}
	want := sharingOf(c)
	switch {
	case isLimited(r) || want == byMPS:
		id := r.Device
		if !isLimited(r) {
			id = string(c.UID) + "-0"
		}
		if d, runs := w.daemons[id]; !runs || !slices.Contains(d.Devices, uuid) {
			return fmt.Errorf("no MPS daemon %s serves device %s (it serves %v)", id, uuid, d.Devices)
		}
		if name.Partition == nil && g.ComputeMode != device.ComputeExclusiveProcess {
			return fmt.Errorf("compute mode of %s is %s", g.name(), g.ComputeMode)
		}
	case want == slicing && name.Partition == nil && g.TimeSlice != device.TimeSliceLong,
		want == shorter && name.Partition == nil && g.TimeSlice != device.TimeSliceShort:
		return fmt.Errorf("the time slices of %s are %d", g.name(), g.TimeSlice)
	}
	return nil
}

func isPassthrough(deviceName string) bool {
	name, _ := device.ParseName(deviceName)
	return name.Passthrough
}

// checkPassthrough returns an error unless the CDI edits give a container the GPU's VFIO node
// alone, and VFIO has the GPU and its audio function.
func (g *gpu) checkPassthrough(edits specs.ContainerEdits) error {
	for _, f := range g.pci {
		if f.Driver != busmodel.VFIO {
			return fmt.Errorf("driver %q has PCI function %s", f.Driver, f.Address)
		}
	}
	if len(edits.DeviceNodes) != 1 || edits.DeviceNodes[0].Path != g.deviceNode() {
		return fmt.Errorf("the CDI spec of %s names %v", g.name(), edits.DeviceNodes)
	}
	return nil
}

// checkEdits returns an error unless the CDI edits give a container the named device of GPU g and
// no other device. Otherwise it returns the device's UUID.
func (w *world) checkEdits(g *gpu, name device.Name, deviceName string, admin bool, edits specs.ContainerEdits) (uuid string, err error) {
	want := []string{fmt.Sprintf("/dev/nvidia%d", g.Minor)}
	uuid = g.UUID
	if name.Partition == nil && g.Enabled && !admin {
		return "", fmt.Errorf("device %s is a whole GPU in MIG mode", deviceName)
	}
	if name.Partition != nil {
		found := false
		for _, in := range g.Instances {
			if in.ProfileID == name.Partition.ProfileID && in.Placement.Start == name.Partition.Start && len(in.Compute) == 1 {
				found, uuid = true, in.Compute[0].UUID
				want = append(want, fmt.Sprintf("%s%d", capDir, in.Minor), fmt.Sprintf("%s%d", capDir, in.Compute[0].Minor))
			}
		}
		if !found {
			return "", fmt.Errorf("device %s does not exist", deviceName)
		}
	}
	var got []string
	for _, n := range edits.DeviceNodes {
		got = append(got, n.Path)
	}
	if !slices.Equal(got, want) {
		return "", fmt.Errorf("device %s has device nodes %q, and its CDI spec names %q", deviceName, want, got)
	}
	return uuid, nil
}

// checkNumbers runs after a reconciliation during which the NVIDIA driver was not loaded. It adds a
// violation if a container that restarts now would get the device node of another claim's GPU.
func (w *world) checkNumbers() {
	for _, c := range w.claims {
		spec, err := w.specs.of(c.uid)
		if c.phase != prepared || len(c.calls) > 0 || err != nil {
			continue
		}
		for _, d := range spec {
			for _, n := range d.ContainerEdits.DeviceNodes {
				if owner := w.ownerOf(n.Path); owner != "" && !strings.Contains(d.Name, owner) {
					w.violates("the CDI spec of claim %s gives device %s the device node %s of %s", c.name, d.Name, n.Path, owner)
				}
			}
		}
	}
}

// ownerOf returns the name of the GPU that has a device node of NVIDIA's driver now.
func (w *world) ownerOf(path string) string {
	for _, g := range w.gpus {
		if !g.unfound && !g.isAway() && path == g.deviceNode() {
			return g.name()
		}
	}
	return ""
}

// checkUnprepared runs when Unprepare has just succeeded. It adds a violation if the claim still
// has a checkpoint record or a CDI spec, or if a holder file has no claim, now or after a power
// cut.
func (w *world) checkUnprepared(uid types.UID) {
	after := w.disk.Clone()
	after.PowerCut()
	for when, disk := range map[string]*durabletest.Disk{"now": w.disk.Clone(), "after a power cut": after} {
		store, err := files(disk)
		if err != nil {
			w.violates("open the state: %v", err)
			return
		}
		if _, found, err := store.Load(uid); found || err != nil {
			w.violates("unprepared claim %s has a record %s: %v", uid, when, err)
		}
		for _, h := range w.holders(store) {
			// A time slice that could not be restored stays until a reconciliation restores it. If a state
			// file was unreadable, the next reconciliation also removes the file.
			if h.Step.Kind != "time-slice" && h.BootID == w.bootID() && !w.stateUnreadable && !w.isShared(store, h) {
				w.violates("claim %s was unprepared, and no claim has holder file %s %s", uid, h.Key, when)
			}
		}
	}
	if spec, err := w.specs.of(uid); spec != nil || err != nil {
		w.violates("unprepared claim %s has a CDI spec: %v", uid, err)
	}
}

func (w *world) holders(store *checkpoint.Store) []checkpoint.Holder {
	keys, err := store.Holders()
	if err != nil {
		w.violates("list the holder files: %v", err)
	}
	var all []checkpoint.Holder
	for _, key := range keys {
		h, _, err := store.Holder(key)
		if unreadable := new(statefile.UnreadableError); w.stateUnreadable && errors.As(err, &unreadable) {
			continue
		}
		if err != nil {
			w.violates("holder file %s: %v", key, err)
			continue
		}
		all = append(all, h)
	}
	return all
}

// noteShared notes what the claim shares whose record is at path, before the record is damaged.
func (w *world) noteShared(path string) {
	var file struct{ Payload checkpoint.Record }
	raw, err := w.disk.ReadFile(path)
	if err != nil || json.Unmarshal(raw, &file) != nil || file.Payload.BootID != w.bootID() || file.Payload.State != checkpoint.Prepared {
		return
	}
	for _, step := range file.Payload.Steps {
		var shared struct{ Key string }
		if step.Kind == "shared" && json.Unmarshal(step.Params, &shared) == nil {
			w.shared[path] = append(w.shared[path], shared.Key)
		}
	}
}

// checkShared adds a violation if what a claim shares whose record is damaged has no holder file
// any more, and so was undone. Its Pod may still run.
func (w *world) checkShared() {
	visible, _ := w.disk.State()
	for path, keys := range w.shared {
		if _, there := visible[path]; !there {
			delete(w.shared, path)
			continue
		}
		for _, key := range keys {
			if _, there := visible[state+"/holders/"+key+".json"]; !there {
				w.violates("%s was undone, which the claim of the damaged record %s shares", key, path)
			}
		}
	}
}

// isShared reports whether a record of this boot names what the holder file is about, or may name
// it because it cannot be read.
func (w *world) isShared(store *checkpoint.Store, h checkpoint.Holder) bool {
	entries, err := store.List()
	if err != nil {
		w.violates("list the records: %v", err)
	}
	return slices.ContainsFunc(entries, func(e checkpoint.Entry) bool {
		r, _, err := store.Load(e.ClaimUID)
		if err != nil {
			return slices.ContainsFunc(h.GPUs, e.MayHave)
		}
		return r.BootID == w.bootID() && slices.ContainsFunc(r.Steps, func(s checkpoint.Step) bool {
			return strings.Contains(string(s.Params), strconv.Quote(h.Key))
		})
	})
}

// checkIdle adds a violation for each invariant that is broken while no call is in flight, such as
// a prepared claim without a checkpoint record.
func (w *world) checkIdle() {
	for i, c := range w.claims {
		if c.phase != prepared {
			continue
		}
		w.checkRecord(w.disk, c.got)
		w.checkMemory(c, c.got)
		if spec, err := w.specs.of(c.uid); err != nil || spec == nil && !c.specMayBeGone {
			w.violates("prepared claim %s has lost its CDI spec: %v", c.name, err)
		}
		if !c.specMayBeGone && slices.Equal(c.disturbed, w.disturbances()) {
			if err := w.usable(c.got); err != nil {
				w.violates("prepared claim %s, whose devices nothing disturbed: %v", c.name, err)
			}
		}
		for _, other := range w.claims[:i] {
			if both := w.conflict(c.got, other.got); other.phase == prepared && both != "" {
				w.violates("devices %s exclude each other, but claims %s and %s hold them", both, c.name, other.name)
			}
		}
	}
	w.checkDaemons()
	w.checkAdminInstances()
	w.checkShared()
}

// checkDaemons adds a violation if an MPS daemon has no holder file. The plugin writes that file
// before it starts the daemon, and removes it after it has stopped the daemon.
func (w *world) checkDaemons() {
	store, err := files(w.disk.Clone())
	if err != nil {
		w.violates("open the state: %v", err)
		return
	}
	keys, err := store.Holders()
	if err != nil {
		w.violates("list the holder files: %v", err)
	}
	for id := range w.daemons {
		if !slices.Contains(keys, id+"_mps-daemon") {
			w.violates("MPS daemon %s runs without a holder file", id)
		}
	}
}

// checkAdminInstances adds a violation if a MIG instance that an admin created was changed or
// destroyed.
func (w *world) checkAdminInstances() {
	for _, g := range w.gpus {
		for id, created := range g.adminInstances {
			if !reflect.DeepEqual(g.Instances[id], created) {
				w.violates("MIG instance %d of %s, which an admin created, has changed", id, g.name())
			}
		}
	}
}

// checkReconciled runs after a reconciliation that nothing disturbed. It adds a violation if a
// prepared claim cannot be used, or if holder files, MIG instances or MPS daemons are left that
// belong to no claim.
func (w *world) checkReconciled() {
	store, err := files(w.disk.Clone())
	if err != nil {
		w.violates("open the state: %v", err)
		return
	}
	for _, c := range w.claims {
		if c.phase != prepared || c.specMayBeGone && w.isOfEarlierBoot(store, c) {
			continue
		}
		if slices.ContainsFunc(w.gpus, func(g *gpu) bool { return g.isAway() && monitors(c.got, g) }) {
			continue
		}
		c.specMayBeGone = false
		if err := w.usable(c.got); err != nil {
			w.violates("after reconciliation: claim %s: %v", c.name, err)
		}
	}
	w.checkNoLeftovers(store)
	w.checkDaemons()
}

// isOfEarlierBoot reports whether the claim's checkpoint record was written before the node's last
// boot. It is false if the record cannot be read.
func (w *world) isOfEarlierBoot(store *checkpoint.Store, c *claim) bool {
	r, _, err := store.Load(c.uid)
	return err == nil && r.BootID != w.bootID()
}

// checkNoLeftovers adds a violation if no claim shares what a holder file is about, or if a MIG
// instance belongs neither to a claim with such a record nor to an admin.
func (w *world) checkNoLeftovers(store *checkpoint.Store) {
	entries, err := store.List()
	if err != nil {
		w.violates("list the records: %v", err)
		return
	}
	held := map[string]bool{}
	for _, e := range entries {
		for _, d := range e.Devices {
			held[strings.TrimSuffix(d, "-share")] = true
		}
	}
	for _, h := range w.holders(store) {
		if !w.isShared(store, h) {
			w.violates("no claim has holder file %s", h.Key)
		}
	}
	for _, g := range w.gpus {
		if g.isAway() && !held[g.name()+"-vfio"] && !w.stateUnreadable {
			w.violates("%s is bound to VFIO for no claim", g.name())
		}
		for id, in := range g.Instances {
			name := fmt.Sprintf("%s-mig-%d-%d", g.name(), in.ProfileID, in.Placement.Start)
			if !g.isAdmins(id) && !held[name] && !w.stateUnreadable {
				w.violates("MIG instance %d of %s (%s) belongs to no claim", id, g.name(), name)
			}
		}
	}
}

// checkEmpty runs when all claims are unprepared. It adds a violation if a file, CDI spec, MIG
// instance, MPS daemon or lock of the plugin is left on the node, or if a GPU's compute mode or
// time slice is not restored.
func (w *world) checkEmpty() {
	visible, synced := w.disk.State()
	for which, there := range map[string]map[string][]byte{"a process": visible, "the disk": synced} {
		for path := range there {
			stateDir := stateDirOf(path[:strings.LastIndex(path, "/")])
			if stateDir != "mark" && (stateDir != "quarantine" || !w.stateUnreadable) {
				w.violates("state file %s is left, as %s sees it", path, which)
			}
		}
	}
	if left := w.specs.files(); len(left) > 0 {
		w.violates("CDI specs are left: %q", left)
	}
	if held, err := w.holdsLock(); err != nil || held {
		w.violates("a lock is held: %v (%v)", held, err)
	}
	if len(w.daemons) > 0 {
		w.violates("MPS daemons are left: %q", slices.Sorted(maps.Keys(w.daemons)))
	}
	for _, g := range w.gpus {
		gone := g.pci[0].Driver != nvidiaDriver || g.pci[0].Override != g.override || g.pci[1].Driver != audioDriver || g.pci[1].Override != ""
		if gone && !w.stateUnreadable {
			w.violates("the PCI functions of %s are left as %+v", g.name(), g.pci)
		}
		if g.lost {
			continue
		}
		for id := range g.Instances {
			if !g.isAdmins(id) && !w.stateUnreadable {
				w.violates("MIG instance %d of %s is left", id, g.name())
			}
		}
		// The plugin must restore the time slice that the admin had set. An exception is the default time
		// slice after an unreadable file or a GPU reset, which lose the admin's setting.
		asFound := g.TimeSlice == initialSlice || g.TimeSlice == device.TimeSliceDefault && (w.stateUnreadable || g.disturbed > 0)
		if g.ComputeMode != device.ComputeDefault || !asFound {
			w.violates("%s is left with compute mode %s and time slices %d", g.name(), g.ComputeMode, g.TimeSlice)
		}
	}
	w.checkAdminInstances()
}
