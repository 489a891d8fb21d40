"""The part of KubeRay's RayService (ray.io/v1) that deployments/kuberay.yaml uses, and the operator's own checks.

From the CRD and the operator's validation of KubeRay 1.5 to 1.7; unknown keys are refused, as `kubectl apply` does.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

Quantity = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
"""A DNS 1035 label."""
LabelKey = Annotated[str, StringConstraints(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?$")]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Port(Part):
    name: Name
    container_port: Annotated[int, Field(gt=0, lt=65536)]


class SecretKey(Part):
    name: Name
    key: str


class ValueFrom(Part):
    secret_key_ref: SecretKey


class Variable(Part):
    name: str
    value: str | None = None
    value_from: ValueFrom | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Variable:
        if (self.value is None) == (self.value_from is None):
            raise ValueError(f"{self.name}: either value or valueFrom")
        return self


class ContainerResources(Part):
    requests: dict[str, Quantity]
    limits: dict[str, Quantity]


class Container(Part):
    name: Name
    image: str
    ports: list[Port] = []
    env: list[Variable] = []
    resources: ContainerResources


class Toleration(Part):
    key: str
    operator: Literal["Exists", "Equal"]
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class PodSpec(Part):
    """No restartPolicy: autoscaler v2 wants it unset. No probes: see the manifest."""

    containers: Annotated[list[Container], Field(min_length=1)]
    tolerations: list[Toleration] = []


class PodTemplate(Part):
    spec: PodSpec


class Group(Part):
    resources: dict[str, Quantity]
    labels: dict[LabelKey, LabelValue]
    ray_start_params: dict[str, str]
    template: PodTemplate

    @model_validator(mode="after")
    def _one_place_for_each(self) -> Group:
        doubled = {"num-cpus", "num-gpus", "memory", "resources", "labels"} & set(self.ray_start_params)
        if doubled:
            raise ValueError(f"{doubled} belong into resources and labels, not into rayStartParams")
        return self

    @property
    def container(self) -> Container:
        return self.template.spec.containers[0]


class WorkerGroup(Group):
    group_name: Name
    replicas: int
    min_replicas: int
    max_replicas: int

    @model_validator(mode="after")
    def _ordered(self) -> WorkerGroup:
        if not 0 <= self.min_replicas <= self.replicas <= self.max_replicas:
            raise ValueError("0 <= minReplicas <= replicas <= maxReplicas")
        return self


class AuthOptions(Part):
    mode: Literal["token", "disabled"]


class AutoscalerOptions(Part):
    version: Literal["v1", "v2"]
    idle_timeout_seconds: int


class RayCluster(Part):
    ray_version: str
    auth_options: AuthOptions
    enable_in_tree_autoscaling: bool
    autoscaler_options: AutoscalerOptions
    head_group_spec: Group
    worker_group_specs: list[WorkerGroup]

    @model_validator(mode="after")
    def _token_needs_a_version_that_knows_it(self) -> RayCluster:
        version = re.fullmatch(r"(\d+)\.(\d+)\.\d+", self.ray_version)
        if version is None or (int(version[1]), int(version[2])) < (2, 52):
            raise ValueError(f"authOptions need rayVersion 2.52.0 or later, not {self.ray_version}")
        return self


class Spec(Part):
    serve_config_v2: str
    ray_cluster_config: RayCluster


class Metadata(Part):
    name: Annotated[Name, Field(max_length=47)]


class RayService(Part):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: Spec


def read(document: Any) -> RayService:
    return RayService.model_validate(document)
