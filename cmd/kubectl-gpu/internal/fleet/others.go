package fleet

import (
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// OtherDriver is a DaemonSet of another driver that also offers or changes NVIDIA GPUs.
type OtherDriver struct {
	DaemonSet *appsv1.DaemonSet
	// What is the driver's name, Guide the page about the move from it.
	What, Guide string
}

// others has a part of the image's name of each other driver.
var others = []struct{ image, what, guide string }{
	{"k8s-device-plugin", "NVIDIA's device plugin", "docs/migration.md, \"From NVIDIA's device plugin\""},
	{"gpu-operator", "the GPU Operator", "docs/migration.md, \"From NVIDIA's device plugin\""},
	{"k8s-dra-driver-gpu", "NVIDIA's DRA driver", "docs/migration.md, \"From NVIDIA's DRA driver\""},
	{"dra-driver-nvidia-gpu", "NVIDIA's DRA driver", "docs/migration.md, \"From NVIDIA's DRA driver\""},
	{"mig-manager", "the MIG manager, which changes partitions", "docs/migration.md"},
}

// OtherDrivers returns the DaemonSets of other drivers, by their images.
func (s *Snapshot) OtherDrivers() []OtherDriver {
	var all []OtherDriver
	for _, d := range s.DaemonSets {
		for _, o := range others {
			if slices.ContainsFunc(d.Spec.Template.Spec.Containers, func(c corev1.Container) bool { return strings.Contains(c.Image, o.image) }) {
				all = append(all, OtherDriver{d, o.what, o.guide})
				break
			}
		}
	}
	return all
}
