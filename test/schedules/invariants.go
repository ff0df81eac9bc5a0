package schedules

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable/durabletest"
)

// What must hold:
//
//  1. No device is held twice: of two claims that the kubelet was told are prepared, no two devices exclude each other, and of
//     no device more memory is held than it has.
//  2. No success without durable state: what an answer promises is there, and would be after a power cut: record, specs, partition, settings, daemon.
//     A claim of which it was said that it is given back is in no file any more.
//  3. A success stays true: a prepared claim keeps its record, and its spec unless something took it that only a comparison can bring back.
//  4. Nothing of anyone else is changed: an admin's instance is not removed, what was set before is set again.
//  5. No leak: when everything works again and all claims were given back, there are no records, specs, holders, instances or daemons, and nobody holds a lock.
//  6. Every claim can be given back, and every device be had again.

// before is how often each card and the supervisor were disturbed so far.
func (w *world) disturbances() []int {
	var all []int
	for _, g := range w.gpus {
		all = append(all, g.disturbed)
	}
	return append(all, w.supervisors)
}

// files is the plugin's state as it is on a disk, past the plugin.
func files(disk durable.FS) (*checkpoint.Store, error) { return checkpoint.Open(state, disk) }

// answered looks at a Prepare that has succeeded, in the moment in which it did.
func (w *world) answered(k *call) {
	after := w.disk.Clone()
	after.PowerCut()
	w.isPrepared(after, k.of)
	for _, other := range w.claims {
		if other == k.claim || other.phase != prepared {
			continue
		}
		if both := w.conflict(k.of, other.got); both != "" {
			w.breaks("%s are held twice: by claims %s and %s", both, k.claim.name, other.name)
		}
	}
	w.fits(k.claim, k.of)
	if slices.Equal(k.before, w.disturbances()) {
		if err := w.promised(k.of); err != nil {
			w.breaks("claim %s was said to be prepared: %v", k.claim.name, err)
		}
	}
}

// fits makes sure that a claim which is prepared leaves the others what they hold.
func (w *world) fits(c *claim, of *resourceapi.ResourceClaim) {
	var held []*resourceapi.ResourceClaim
	for _, other := range w.claims {
		if other != c && other.phase == prepared {
			held = append(held, other.got)
		}
	}
	if much := w.overfull(of, held); much != "" {
		w.breaks("claims that are prepared, %s among them, hold %s", c.name, much)
	}
}

// isPrepared makes sure of a claim's record.
func (w *world) isPrepared(disk *durabletest.Disk, c *resourceapi.ResourceClaim) {
	store, err := files(disk)
	if err != nil {
		w.breaks("open the state: %v", err)
		return
	}
	r, found, err := store.Load(c.UID)
	if err != nil || !found || r.State != checkpoint.Prepared || !sameDevices(r, c) {
		w.breaks("claim %s is prepared, and its record on the disk is %v, %s, %v: %v", c.Name, found, r.State, r.Devices, err)
	}
}

func sameDevices(r checkpoint.Record, c *resourceapi.ResourceClaim) bool {
	return slices.EqualFunc(r.Devices, results(c), sameAs)
}

func sameAs(d checkpoint.Device, want result) bool {
	return d.Request == want.Request && d.Device == want.Device && d.AdminAccess == ptr.Deref(want.AdminAccess, false) && ptr.Deref(d.ShareID, "") == ptr.Deref(want.ShareID, "")
}

// promised makes sure that a container of the claim would get what the claim was allocated.
func (w *world) promised(c *resourceapi.ResourceClaim) error {
	if !w.specs.hasBase() {
		return errors.New("there is no base spec")
	}
	spec, err := w.specs.of(c.UID)
	if err != nil || spec == nil {
		return fmt.Errorf("it has no spec: %w", err)
	}
	var errs []error
	for _, r := range results(c) {
		errs = append(errs, w.has(c, r, spec))
	}
	return errors.Join(errs...)
}

// has makes sure of one device.
func (w *world) has(c *resourceapi.ResourceClaim, r result, spec []specs.Device) error {
	i := slices.IndexFunc(spec, func(d specs.Device) bool { return d.Name == cdi.ClaimDeviceName(c.UID, r.Device, r.ShareID) })
	if i < 0 {
		return fmt.Errorf("device %s is not in its spec", r.Device)
	}
	name, ok := device.ParseName(r.Device)
	g := w.gpu(name.GPU)
	if !ok || g == nil {
		return fmt.Errorf("device %s does not exist", r.Device)
	}
	admin := ptr.Deref(r.AdminAccess, false)
	uuid, err := w.given(g, name, r.Device, admin, spec[i].ContainerEdits)
	if err != nil || admin {
		return err
	}
	want := sharingOf(c)
	switch {
	case isLimited(r) || want == byMPS:
		id := r.Device
		if !isLimited(r) {
			id = string(c.UID) + "-0"
		}
		if d, runs := w.daemons[id]; !runs || !slices.Contains(d.Devices, uuid) {
			return fmt.Errorf("no daemon %s runs over %s (%v)", id, uuid, d.Devices)
		}
		if name.Partition == nil && g.mode != device.ComputeExclusiveProcess {
			return fmt.Errorf("compute mode of %s is %s", g.name(), g.mode)
		}
	case want == slicing && name.Partition == nil && g.slice != device.TimeSliceLong, want == shorter && name.Partition == nil && g.slice != device.TimeSliceShort:
		return fmt.Errorf("the time slices of %s are %d", g.name(), g.slice)
	}
	return nil
}

// given makes sure that these edits give the device, and no other.
func (w *world) given(g *gpu, name device.Name, deviceName string, admin bool, edits specs.ContainerEdits) (uuid string, err error) {
	want := []string{fmt.Sprintf("/dev/nvidia%d", g.minor)}
	uuid = g.uuid
	if name.Partition == nil && g.on && !admin {
		return "", fmt.Errorf("device %s is a whole GPU, and in MIG mode", deviceName)
	}
	if name.Partition != nil {
		found := false
		for _, in := range g.instances {
			if in.ProfileID == name.Partition.ProfileID && in.Placement.Start == name.Partition.Start && len(in.Compute) == 1 {
				found, uuid = true, in.Compute[0].UUID
				want = append(want, fmt.Sprintf("%s%d", capDir, in.Minor), fmt.Sprintf("%s%d", capDir, in.Compute[0].Minor))
			}
		}
		if !found {
			return "", fmt.Errorf("device %s is not there", deviceName)
		}
	}
	var got []string
	for _, n := range edits.DeviceNodes {
		got = append(got, n.Path)
	}
	if !slices.Equal(got, want) {
		return "", fmt.Errorf("device %s is %q, and its spec gives %q", deviceName, want, got)
	}
	return uuid, nil
}

// gone looks at an Unprepare that has succeeded.
func (w *world) gone(uid types.UID) {
	after := w.disk.Clone()
	after.PowerCut()
	for when, disk := range map[string]*durabletest.Disk{"now": w.disk.Clone(), "after a power cut": after} {
		store, err := files(disk)
		if err != nil {
			w.breaks("open the state: %v", err)
			return
		}
		if _, found, err := store.Load(uid); found || err != nil {
			w.breaks("claim %s was said to be given back, and has a record %s: %v", uid, when, err)
		}
		for _, h := range w.holders(store) {
			// Of a file that could not be read for a moment the next comparison takes the claim.
			if h.Holds(uid) && !w.blind {
				w.breaks("claim %s was said to be given back, and holds %s %s", uid, h.Key, when)
			}
		}
	}
	if spec, err := w.specs.of(uid); spec != nil || err != nil {
		w.breaks("claim %s was said to be given back, and has a spec: %v", uid, err)
	}
}

func (w *world) holders(store *checkpoint.Store) []checkpoint.Holder {
	keys, err := store.Holders()
	if err != nil {
		w.breaks("list the holders: %v", err)
	}
	var all []checkpoint.Holder
	for _, key := range keys {
		h, _, err := store.Holder(key)
		if unreadable := new(checkpoint.UnreadableError); w.blind && errors.As(err, &unreadable) {
			continue
		}
		if err != nil {
			w.breaks("holder %s: %v", key, err)
			continue
		}
		all = append(all, h)
	}
	return all
}

// quiet looks at what must hold whenever nothing is under way.
func (w *world) quiet() {
	for i, c := range w.claims {
		if c.phase != prepared {
			continue
		}
		w.isPrepared(w.disk, c.got)
		w.fits(c, c.got)
		if spec, err := w.specs.of(c.uid); err != nil || spec == nil && !c.unspecified {
			w.breaks("claim %s is prepared, and its spec is gone: %v", c.name, err)
		}
		if !c.unspecified && slices.Equal(c.before, w.disturbances()) {
			if err := w.promised(c.got); err != nil {
				w.breaks("claim %s is prepared, and nothing has happened to its devices: %v", c.name, err)
			}
		}
		for _, other := range w.claims[:i] {
			if both := w.conflict(c.got, other.got); other.phase == prepared && both != "" {
				w.breaks("%s are held twice: by claims %s and %s", both, c.name, other.name)
			}
		}
	}
	w.daemonsAreHeld()
	w.theirsAreThere()
}

// daemonsAreHeld makes sure that each daemon has a file that says who holds it: it is written before the daemon is started, and goes after it. No comparison
// is needed to end one.
func (w *world) daemonsAreHeld() {
	store, err := files(w.disk.Clone())
	if err != nil {
		w.breaks("open the state: %v", err)
		return
	}
	keys, err := store.Holders()
	if err != nil {
		w.breaks("list the holders: %v", err)
	}
	for id := range w.daemons {
		if !slices.Contains(keys, id+"_mps-daemon") {
			w.breaks("daemon %s runs, and no file says who holds it", id)
		}
	}
}

// theirsAreThere makes sure of what admins have cut.
func (w *world) theirsAreThere() {
	for _, g := range w.gpus {
		for id, cut := range g.theirs {
			if !reflect.DeepEqual(g.instances[id], cut) {
				w.breaks("instance %d of %s is not any more as an admin has cut it", id, g.name())
			}
		}
	}
}

// compared looks at what must hold after a comparison of all, in which nothing went wrong and beside which nothing happened.
func (w *world) compared() {
	store, err := files(w.disk.Clone())
	if err != nil {
		w.breaks("open the state: %v", err)
		return
	}
	for _, c := range w.claims {
		if c.phase != prepared || c.unspecified && w.isOfEarlierBoot(store, c) {
			continue
		}
		c.unspecified = false
		if err := w.promised(c.got); err != nil {
			w.breaks("after a comparison: claim %s: %v", c.name, err)
		}
	}
	w.noStrays(store)
	w.daemonsAreHeld()
}

// isOfEarlierBoot says whether the kubelet has not prepared the claim since the node was started.
func (w *world) isOfEarlierBoot(store *checkpoint.Store, c *claim) bool {
	r, _, err := store.Load(c.uid)
	return err == nil && r.BootID != w.bootID()
}

// noStrays makes sure that everything there is belongs to a claim with a record, or to somebody else.
func (w *world) noStrays(store *checkpoint.Store) {
	entries, err := store.List()
	if err != nil {
		w.breaks("list the records: %v", err)
		return
	}
	recorded := map[types.UID]bool{}
	held := map[string]bool{}
	for _, e := range entries {
		recorded[e.ClaimUID] = true
		for _, d := range e.Devices {
			held[strings.TrimSuffix(d, "-share")] = true
		}
	}
	for _, h := range w.holders(store) {
		for _, c := range h.Claims {
			if !recorded[c.UID] && h.BootID == w.bootID() {
				w.breaks("holder %s is held by claim %s, which has no record", h.Key, c.UID)
			}
		}
	}
	for _, g := range w.gpus {
		for id, in := range g.instances {
			name := fmt.Sprintf("%s-mig-%d-%d", g.name(), in.ProfileID, in.Placement.Start)
			if !g.isTheirs(id) && !held[name] && !w.blind {
				w.breaks("instance %d of %s (%s) is there for nobody", id, g.name(), name)
			}
		}
	}
}

// empty looks at what must hold when all claims were given back.
func (w *world) empty() {
	visible, synced := w.disk.State()
	for which, there := range map[string]map[string][]byte{"a process": visible, "the disk": synced} {
		for path := range there {
			if room := roomOf(path[:strings.LastIndex(path, "/")]); room != "mark" && (room != "quarantine" || !w.blind) {
				w.breaks("%s is left, as %s sees it", path, which)
			}
		}
	}
	if left := w.specs.files(); len(left) > 0 {
		w.breaks("specs are left: %q", left)
	}
	if held, err := w.heldLocks(); err != nil || len(held) > 0 {
		w.breaks("locks are held: %q (%v)", held, err)
	}
	if len(w.daemons) > 0 {
		w.breaks("daemons are left: %q", slices.Sorted(maps.Keys(w.daemons)))
	}
	for _, g := range w.gpus {
		if g.lost {
			continue
		}
		for id := range g.instances {
			if !g.isTheirs(id) && !w.blind {
				w.breaks("instance %d of %s is left", id, g.name())
			}
		}
		// What was found is not known any more where its file could not be read, and need not be the same after the card has forgotten.
		asFound := g.slice == foundSlice || g.slice == device.TimeSliceDefault && (w.blind || g.disturbed > 0)
		if g.mode != device.ComputeDefault || !asFound {
			w.breaks("%s is left with compute mode %s and time slices %d", g.name(), g.mode, g.slice)
		}
	}
	w.theirsAreThere()
}
