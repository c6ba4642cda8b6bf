"""What every part of the configuration is made of."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """A part of the configuration: immutable, no unknown keys, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def with_defaults(self, **values: Any) -> Self:
        """The same with other defaults: values for keys that nobody has set."""
        unset = {key: value for key, value in values.items() if key not in self.model_fields_set}
        return self.model_copy(update=unset)
