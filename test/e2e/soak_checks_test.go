package e2e

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// use says that a container had a device, from the time from to the time to, in seconds since the
// machine's start.
type use struct {
	pod, gpu     string
	profile, mig string // of the MIG device; empty for a whole GPU
	share        bool
	from, to     float64
}

// excludes reports whether two uses must not overlap in time: they are of the same device, or of a
// GPU and its MIG device, and are not two shares of one device.
func (a use) excludes(b use) bool {
	sameDevice := a.gpu == b.gpu && (a.mig == "" || b.mig == "" || a.mig == b.mig)
	bothShares := a.share && b.share && a.mig == b.mig
	return sameDevice && !bothShares
}

// check fails the test unless a Pod has succeeded and its container had exactly the devices of the
// Pod's claim. It adds what the container used to s.uses.
func (s *soak) check(l life) {
	s.t.Helper()
	if l.err != nil {
		name := ""
		if l.pod != nil {
			name = l.pod.Name
		}
		s.t.Errorf("%v: %+v\n%s", l.err, l.pod, s.events(s.t, s.namespace, name))
		return
	}
	var ended *corev1.ContainerStateTerminated
	if status := l.pod.Status.ContainerStatuses; len(status) == 1 {
		ended = status[0].State.Terminated
		if before := status[0].LastTerminationState.Terminated; before != nil && !strings.Contains(before.Message, "context canceled") {
			s.t.Errorf("Pod %s: the first start of its container failed: %+v", l.pod.Name, before)
		}
	}
	if ended == nil || ended.ExitCode != 0 {
		s.t.Errorf("Pod %s: %+v\n%s", l.pod.Name, l.pod.Status, s.events(s.t, s.namespace, l.pod.Name))
		return
	}
	uses, err := s.seen(l, ended.Message)
	if err != nil {
		s.t.Errorf("Pod %s: %v; its container said\n%s", l.pod.Name, err, ended.Message)
		return
	}
	s.uses = append(s.uses, uses...)
	s.done[l.kind.name]++
	for _, c := range l.pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			s.starts[l.kind.name] = append(s.starts[l.kind.name], ended.StartedAt.Sub(c.LastTransitionTime.Time))
		}
	}
}

var (
	fromForm = regexp.MustCompile(`(?m)^from (\S+)$`)
	toForm   = regexp.MustCompile(`(?m)^to (\S+)$`)
	// listForm matches a line of nvidia-smi -L: a GPU, or a MIG device below its GPU.
	listForm = regexp.MustCompile(`(?m)^(?:GPU|\s+MIG (\S+)\s+Device)\s+\d+:.*\(UUID: (\S+)\)$`)
)

// seen returns an error unless a container saw exactly the devices of its claim, and was a client
// of MPS only if Pods of its kind are. said is the container's output. The result has one use for
// each device.
func (s *soak) seen(l life, said string) ([]use, error) {
	from, errFrom := only(fromForm, said)
	to, errTo := only(toForm, said)
	uses, errList := listed(said)
	want, share, errGiven := s.given(l.claim)
	if err := errors.Join(errFrom, errTo, errList, errGiven); err != nil {
		return nil, err
	}
	reported := statusUUIDs(l.claim)
	var have []string
	for i := range uses {
		u := &uses[i]
		u.pod, u.share, u.from, u.to = l.pod.Name, share, from, to
		have = append(have, u.gpu+" "+u.profile)
		if u.mig != "" && len(reported) > 0 && !slices.Contains(reported, u.mig) {
			return nil, fmt.Errorf("the claim's status lists only the MIG devices %v", reported)
		}
	}
	slices.Sort(have)
	if len(want) == 0 || !slices.Equal(want, have) {
		return nil, fmt.Errorf("the Pod was allocated %q and saw %q", want, have)
	}
	if isClient := strings.Contains(said, `"mode":"mps"`); isClient != l.kind.client {
		return nil, fmt.Errorf("a program in the container was a client of MPS: %t", isClient)
	}
	return uses, nil
}

// listed returns the devices in a container's output. It returns an error unless the output lists
// them twice in the same way.
func listed(said string) ([]use, error) {
	var all []use
	for _, m := range listForm.FindAllStringSubmatch(said, -1) {
		profile, uuid := m[1], m[2]
		if profile == "" {
			all = append(all, use{gpu: uuid})
			continue
		}
		if len(all) == 0 {
			return nil, errors.New("nvidia-smi lists a MIG device before any GPU")
		}
		if all[len(all)-1].mig != "" { // another MIG device of the same GPU
			all = append(all, use{gpu: all[len(all)-1].gpu})
		}
		last := &all[len(all)-1]
		last.profile, last.mig = profile, uuid
	}
	once := all[:len(all)/2]
	if !slices.Equal(once, all[len(all)/2:]) {
		return nil, errors.New("the container saw other devices in the end than at first")
	}
	return once, nil
}

// given returns the devices that a claim was allocated, sorted, each as GPU UUID and profile. share
// is true if the devices are shares.
func (s *soak) given(claim *resourceapi.ResourceClaim) (devices []string, share bool, err error) {
	for _, r := range claim.Status.Allocation.Devices.Results {
		d, ok := s.known[r.Device]
		if !ok {
			return nil, false, fmt.Errorf("the Pod was allocated %s, which was not offered when the soak test began", r.Device)
		}
		devices = append(devices, *d.Attributes["parentUUID"].StringValue+" "+ptr.Deref(d.Attributes["profile"].StringValue, ""))
		share = strings.HasSuffix(*d.Attributes["type"].StringValue, "-share")
	}
	slices.Sort(devices)
	return devices, share, nil
}

var migUUIDForm = regexp.MustCompile(`"uuid":"(MIG-[0-9a-f-]+)"`)

// statusUUIDs returns the UUIDs of the MIG devices in a claim's status. There may be none, because
// the plugin may have been killed before it wrote them.
func statusUUIDs(claim *resourceapi.ResourceClaim) []string {
	var uuids []string
	for _, d := range claim.Status.Devices {
		if d.Data != nil {
			if m := migUUIDForm.FindSubmatch(d.Data.Raw); m != nil {
				uuids = append(uuids, string(m[1]))
			}
		}
	}
	return uuids
}

func only(form *regexp.Regexp, text string) (float64, error) {
	m := form.FindAllStringSubmatch(text, -1)
	if len(m) != 1 {
		return 0, fmt.Errorf("%d times %s", len(m), form)
	}
	return strconv.ParseFloat(m[0][1], 64)
}

// neverTwice fails the test if containers of two Pods had the same device at the same time, unless
// each had a share of the device.
func (s *soak) neverTwice() {
	s.t.Helper()
	byStart := slices.SortedFunc(slices.Values(s.uses), func(a, b use) int { return int(1000 * (a.from - b.from)) })
	for i, a := range byStart {
		for _, b := range byStart[i+1:] {
			if b.from >= a.to {
				break
			}
			if a.pod != b.pod && a.excludes(b) {
				s.t.Errorf("Pods %s and %s had the same device at the same time: %+v and %+v", a.pod, b.pod, a, b)
			}
		}
	}
}
